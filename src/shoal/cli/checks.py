"""The checks of ``shoal doctor``: one function for each fact about the machine."""

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
from shoal.runtime.world.interfaces import IFNAME_VARIABLE, bind, gloo_choice, is_loopback

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 10)  # older versions load checkpoints unsafely (CVE-2026-24747)
SHM_NBYTES = 64 << 20  # least free shared memory for each worker
DISK_NBYTES = 1 << 30  # least free space for checkpoints
FILES_BASE = 128  # open files that a run needs, besides FILES_PER_WORKER for each worker
FILES_PER_WORKER = 16


class Finding(NamedTuple):
    """The result of one check: its name, its status, the fact that it found, and how to fix it."""

    name: str
    status: Literal["ok", "warn", "fail"]
    fact: str
    fix: str = ""


def examine(workers: int) -> list[Finding]:
    """Run all checks for a number of workers. A check that raises counts as failed."""
    findings = []
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        try:
            findings.append(check(name, workers))
        except Exception as error:  # one broken check must not hide the results of the others
            findings.append(Finding(name, "fail", f"could not be checked: {error}"))
    return findings


def python(name: str, workers: int) -> Finding:
    """Check the version of the interpreter."""
    fact = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        return Finding(name, "fail", fact, "install Python 3.10 or newer")
    return Finding(name, "ok", fact)


def torch(name: str, workers: int) -> Finding:
    """Check the version of torch, and count the GPUs that it sees."""
    try:
        import torch
    except ImportError as error:
        return Finding(name, "fail", str(error), "pip install 'torch>=2.10'")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    fact = f"{torch.__version__}, {cards} GPU{'' if cards == 1 else 's'}"
    return torch_version(name, str(torch.__version__), fact)


def torch_version(name: str, version: str, fact: str) -> Finding:
    """Check that a version of torch is new enough."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < OLDEST_TORCH:
        return Finding(name, "fail", fact, "pip install --upgrade 'torch>=2.10'")
    return Finding(name, "ok", fact)


def backends(name: str, workers: int) -> Finding:
    """Check which communication backends this build of torch has."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Finding(name, "fail", "torch has no torch.distributed", "install another build")
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    available["mpi"] = dist.is_mpi_available()
    fact = ", ".join(f"{key} {'yes' if value else 'no'}" for key, value in available.items())
    if not available["gloo"]:
        return Finding(name, "fail", fact, "install a torch built with gloo")
    if torch.cuda.is_available() and not available["nccl"]:
        return Finding(name, "warn", fact, "the GPUs need nccl: install the CUDA build of torch")
    return Finding(name, "ok", fact)


def shoal_backend(name: str, workers: int) -> Finding:
    """Check that workers can share memory. Report whether they can read each other's memory."""
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
    medium = f"a file in {Path(offer.path).parent}" if offer.linked else "an anonymous file"
    reading = f"workers {'can' if code == 0 else 'cannot'} read each other's memory"
    if direct_nbytes() == NEVER:
        reading = f"{DIRECT_MB} forbids workers to read each other's memory"
    return Finding(name, "ok", f"memory is shared by {medium}; {reading}")


def cores(name: str, workers: int) -> Finding:
    """Compare the number of workers with the number of usable cores."""
    usable = usable_cores()
    fact = f"{usable} usable for {workers} worker{'' if workers == 1 else 's'}"
    if workers > most_workers():
        return Finding(name, "fail", fact, f"use -n {most_workers()}, or add --oversubscribe")
    if workers > usable:
        return Finding(name, "warn", fact, f"workers will share cores; use -n {usable}")
    return Finding(name, "ok", fact)


def omp_threads(name: str, workers: int) -> Finding:
    """Compare the total number of threads of all workers with the number of cores."""
    count, text = usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, count // workers)
    if not text:
        return Finding(name, "ok", f"not set; shoal run gives each worker {share} threads")
    if not text.isdigit() or int(text) < 1:
        return Finding(name, "fail", f"OMP_NUM_THREADS={text!r}", "unset OMP_NUM_THREADS")
    if int(text) * workers > count:
        fact = f"{text} threads x {workers} workers on {count} cores"
        return Finding(name, "warn", fact, f"export OMP_NUM_THREADS={share}")
    return Finding(name, "ok", f"OMP_NUM_THREADS={text}")


def shared_memory(name: str, workers: int) -> Finding:
    """Check for free space in /dev/shm, where data loaders pass batches."""
    directory = Path("/dev/shm")
    if not directory.is_dir():
        return Finding(name, "ok", "no /dev/shm on this system")
    free, need = shutil.disk_usage(directory).free, SHM_NBYTES * workers
    fact = f"{size(free)} free in /dev/shm"
    if free < need:
        fix = f"data loaders need about {size(need)}: use docker run --shm-size=1g, or processes=0"
        return Finding(name, "warn", fact, fix)
    return Finding(name, "ok", fact)


def open_files(name: str, workers: int) -> Finding:
    """Check the limit of open files, which the workers' sockets and data loaders' pipes need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = FILES_BASE + FILES_PER_WORKER * workers
    fact = f"{soft}; the maximum is {hard}" if soft != resource.RLIM_INFINITY else "no limit"
    if soft != resource.RLIM_INFINITY and soft < need:
        status: Literal["warn", "fail"] = "fail" if soft < FILES_BASE else "warn"
        return Finding(name, status, fact, f"ulimit -n {max(need, 1024)}")
    return Finding(name, "ok", fact)


def ports(name: str, workers: int) -> Finding:
    """Check that the store can listen on loopback."""
    try:
        with bind(0, everywhere=False) as listener:
            return Finding(name, "ok", f"can listen on 127.0.0.1:{listener.getsockname()[1]}")
    except UsageError as error:
        return Finding(name, "fail", str(error), "bring up loopback: ip link set lo up")


def clock(name: str, workers: int) -> Finding:
    """Check the monotonic clock, which timeouts use, and the wall clock, which file names use."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(0.05)
    wall, steady = time.time() - wall, time.monotonic() - steady
    fact = f"the monotonic and the wall clock differ by {abs(wall - steady) * 1e3:.1f} ms in 50 ms"
    if steady <= 0 or steady > 5:
        return Finding(name, "fail", fact, "the monotonic clock is wrong; check what changes it")
    if abs(wall - steady) > 0.02:
        return Finding(name, "warn", fact, "something is setting the wall clock; check NTP")
    if time.gmtime().tm_year < 2025:
        return Finding(name, "warn", f"the year is {time.gmtime().tm_year}", "set the clock")
    return Finding(name, "ok", fact)


def network(name: str, workers: int) -> Finding:
    """Check that gloo would use an address that other machines can reach."""
    try:
        choice = gloo_choice()
    except UsageError as error:
        return Finding(name, "fail", str(error), f"unset or correct {IFNAME_VARIABLE}")
    if is_loopback(choice):
        fact = f"gloo would use {choice}, which other machines cannot reach"
        return Finding(name, "warn", fact, f"for several machines: export {IFNAME_VARIABLE}=eth0")
    return Finding(name, "ok", f"gloo would use {choice}")


def disk(name: str, workers: int) -> Finding:
    """Check that the current directory can be written and has space for checkpoints."""
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    fact = f"{size(free)} free in {here}"
    if not os.access(here, os.W_OK):
        return Finding(name, "warn", f"{here} cannot be written", "use --dir and --checkpoint")
    if free < DISK_NBYTES:
        fix = "checkpoints may not fit: free some space, or use another --checkpoint"
        return Finding(name, "warn", fact, fix)
    return Finding(name, "ok", fact)


def temporary_files(name: str, workers: int) -> Finding:
    """Check that the launcher can write temporary files."""
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-") as directory:
            Path(directory, "trial").write_bytes(b"\0" * 4096)
    except OSError as error:
        return Finding(name, "fail", str(error), "set TMPDIR to a directory with free space")
    return Finding(name, "ok", f"{tempfile.gettempdir()} can be written")


def size(nbytes: float) -> str:
    """Return a number of bytes in a readable unit.

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
