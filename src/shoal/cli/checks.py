"""What ``shoal doctor`` looks at: one small function a fact of the machine."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from shoal.cores import usable_cores
from shoal.errors import UsageError
from shoal.runtime.launcher.options import most_workers
from shoal.runtime.launcher.store_host import bind
from shoal.runtime.world.interfaces import IFNAME, gloo_choice, is_loopback

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 10)  # older ones load checkpoints unsafely (CVE-2026-24747)
SHM_NBYTES = 64 << 20  # for each worker
DISK_NBYTES = 1 << 30
FILES_BASE = 128
FILES_PER_WORKER = 16


class Finding(NamedTuple):
    """One line of the report."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""


def examine(workers: int) -> list[Finding]:
    """All findings, for so many workers; a check that itself breaks is a finding too."""
    findings = []
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        try:
            findings.append(check(name, workers))
        except Exception as error:  # a report with a hole is worse than one that says so
            findings.append(Finding(name, "fail", f"could not be checked: {error}"))
    return findings


def python(name: str, workers: int) -> Finding:
    """The interpreter."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        return Finding(name, "fail", found, "install Python 3.10 or newer")
    return Finding(name, "ok", found)


def torch(name: str, workers: int) -> Finding:
    """Its version, and what it was built for."""
    try:
        import torch
    except ImportError as error:
        return Finding(name, "fail", str(error), "pip install 'torch>=2.10'")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = f"{torch.__version__}, {cards} GPU{'' if cards == 1 else 's'}"
    return torch_version(name, str(torch.__version__), found)


def torch_version(name: str, version: str, found: str) -> Finding:
    """Whether a version is new enough."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < OLDEST_TORCH:
        return Finding(name, "fail", found, "pip install --upgrade 'torch>=2.10'")
    return Finding(name, "ok", found)


def backends(name: str, workers: int) -> Finding:
    """What can carry bytes between processes."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Finding(name, "fail", "torch.distributed is not built in", "install another torch")
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    there["mpi"] = dist.is_mpi_available()
    found = ", ".join(f"{key} {'yes' if value else 'no'}" for key, value in there.items())
    if not there["gloo"]:
        return Finding(name, "fail", found, "install a torch built with gloo")
    if torch.cuda.is_available() and not there["nccl"]:
        return Finding(name, "warn", found, "GPUs without nccl: install the CUDA build of torch")
    return Finding(name, "ok", found)


def shoal_backend(name: str, workers: int) -> Finding:
    """Whether workers of this machine can share memory, and read each other's."""
    from shoal.wire.shm.memory import segment
    from shoal.wire.shm.memory.cma import Token, can_read
    from shoal.wire.shm.options import DIRECT_MB, NEVER, direct_nbytes

    try:
        offer = segment.create(SHM_NBYTES)
    except UsageError as error:
        return Finding(name, "warn", str(error), "enlarge /dev/shm, or shoal run --backend gloo")
    offer.close()
    token, parent = Token(), os.getpid()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os._exit(0 if can_read(parent, token.card) else 1)
        os._exit(1)
    _, code = os.waitpid(child, 0)
    place = f"a file in {Path(offer.path).parent}" if offer.linked else "an anonymous file"
    if direct_nbytes() == NEVER:
        reading = f"{DIRECT_MB} forbids workers to read each other's"
    else:
        reading = f"workers {'can' if code == 0 else 'cannot'} read each other's"
    return Finding(name, "ok", f"memory is shared by {place}; {reading}")


def cores(name: str, workers: int) -> Finding:
    """Against the number of workers."""
    usable = usable_cores()
    found = f"{usable} usable for {workers} worker{'' if workers == 1 else 's'}"
    if workers > most_workers():
        return Finding(name, "fail", found, f"at most {most_workers()} here, or --oversubscribe")
    if workers > usable:
        return Finding(name, "warn", found, f"workers will share cores: use -n {usable}")
    return Finding(name, "ok", found)


def omp_threads(name: str, workers: int) -> Finding:
    """Threads of all workers together against the cores."""
    count = usable_cores()
    text = os.environ.get("OMP_NUM_THREADS", "")
    if not text:
        return Finding(
            name, "ok", f"not set; shoal run gives each worker {max(1, count // workers)}"
        )
    if not text.isdigit() or int(text) < 1:
        return Finding(name, "fail", f"OMP_NUM_THREADS={text!r}", "unset OMP_NUM_THREADS")
    if int(text) * workers > count:
        found = f"{text} threads x {workers} workers on {count} cores"
        return Finding(name, "warn", found, f"export OMP_NUM_THREADS={max(1, count // workers)}")
    return Finding(name, "ok", f"OMP_NUM_THREADS={text}")


def shared_memory(name: str, workers: int) -> Finding:
    """Room in /dev/shm, where data loaders hand over batches."""
    place = Path("/dev/shm")
    if not place.is_dir():
        return Finding(name, "ok", "no /dev/shm on this system")
    free, need = shutil.disk_usage(place).free, SHM_NBYTES * workers
    found = f"{size(free)} free in /dev/shm"
    if free < need:
        fix = f"data loaders need about {size(need)}: docker run --shm-size=1g, or processes=0"
        return Finding(name, "warn", found, fix)
    return Finding(name, "ok", found)


def open_files(name: str, workers: int) -> Finding:
    """Every pair of workers holds sockets, every data loader pipes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = FILES_BASE + FILES_PER_WORKER * workers
    found = f"{soft} of at most {hard}" if soft != resource.RLIM_INFINITY else "without limit"
    if soft != resource.RLIM_INFINITY and soft < need:
        status: Literal["warn", "fail"] = "fail" if soft < FILES_BASE else "warn"
        return Finding(name, status, found, f"ulimit -n {max(need, 1024)}")
    return Finding(name, "ok", found)


def ports(name: str, workers: int) -> Finding:
    """Whether workers can meet on loopback."""
    try:
        with bind(0, everywhere=False) as listener:
            return Finding(name, "ok", f"can listen on 127.0.0.1:{listener.getsockname()[1]}")
    except UsageError as error:
        return Finding(name, "fail", str(error), "bring up loopback: ip link set lo up")


def clock(name: str, workers: int) -> Finding:
    """Timeouts count on the monotonic clock, file names on the wall clock."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(0.05)
    wall, steady = time.time() - wall, time.monotonic() - steady
    found = f"monotonic and wall clock differ by {abs(wall - steady) * 1e3:.1f} ms in 50 ms"
    if steady <= 0 or steady > 5:
        return Finding(name, "fail", found, "the monotonic clock is wrong: is time being faked?")
    if abs(wall - steady) > 0.02:
        return Finding(name, "warn", found, "the wall clock is being set: check NTP")
    if time.gmtime().tm_year < 2025:
        return Finding(name, "warn", f"the year is {time.gmtime().tm_year}", "set the clock")
    return Finding(name, "ok", found)


def network(name: str, workers: int) -> Finding:
    """The interface gloo takes when several machines train together."""
    try:
        choice = gloo_choice()
    except UsageError as error:
        return Finding(name, "fail", str(error), f"unset {IFNAME}, or name an interface")
    if is_loopback(choice) or choice in ("lo", "lo0"):
        found = f"gloo would use {choice}: fine on one machine, unreachable from others"
        return Finding(name, "warn", found, f"for several machines: export {IFNAME}=eth0")
    return Finding(name, "ok", f"gloo would use {choice}")


def disk(name: str, workers: int) -> Finding:
    """Room for checkpoints where one stands."""
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    found = f"{size(free)} free in {here}"
    if not os.access(here, os.W_OK):
        return Finding(name, "warn", f"{here} cannot be written", "use --dir and --checkpoint")
    if free < DISK_NBYTES:
        return Finding(name, "warn", found, "checkpoints may not fit: free some, or --checkpoint")
    return Finding(name, "ok", found)


def temporary_files(name: str, workers: int) -> Finding:
    """Whether the launcher has a place for its own."""
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-") as directory:
            Path(directory, "trial").write_bytes(b"\0" * 4096)
    except OSError as error:
        return Finding(name, "fail", str(error), "set TMPDIR to a directory with room")
    return Finding(name, "ok", f"{tempfile.gettempdir()} can be written")


def size(nbytes: float) -> str:
    """In words.

    >>> size(3 << 30)
    '3.0 GiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


CHECKS: tuple[Callable[[str, int], Finding], ...] = (
    python, torch, backends, shoal_backend, cores, omp_threads, shared_memory, open_files, ports,
    clock, network, disk, temporary_files,
)  # fmt: skip
