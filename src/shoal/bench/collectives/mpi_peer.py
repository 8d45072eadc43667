"""Open MPI as a peer of the suite ``collectives``, where it and mpi4py are installed.

The workers of a measurement are then started by ``mpirun`` instead of being forked. Each has the
process groups of torch and MPI's own world, so that all contenders take turns in the same
processes. Nothing in Shoal needs MPI; without it the suite says so and measures the others.

MPI waits by polling. ``mpi_yield_when_idle`` makes it yield the core in between, which is necessary
where ranks share cores. Its processes are not bound to cores, because those of its peers are not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from shoal.bench.collectives.calls import Call
from shoal.bench.collectives.times import time_blocks
from shoal.errors import FaultError
from shoal.testing.processes import free_port

_OPTIONS = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
_SETTINGS = ("--mca", "mpi_yield_when_idle", "1")
_MAIN = "import sys; from shoal.bench.collectives.mpi_peer import work; work(*sys.argv[1:])"
_SECONDS, _TRIAL_SECONDS = 1800, 60


class MpiInstallation(NamedTuple):
    """MPI's name with its version, or why it cannot be measured."""

    name: str = ""
    why_not: str = ""


@lru_cache(maxsize=1)
def find_mpi() -> MpiInstallation:
    """Look for Open MPI and mpi4py, and try them."""
    if find_spec("mpi4py") is None:
        return MpiInstallation(why_not="mpi4py is not installed (pip install mpi4py)")
    if shutil.which("mpirun") is None:
        return MpiInstallation(why_not="there is no mpirun (Debian: apt-get install openmpi-bin)")
    output = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    version = re.search(r"Open MPI\)? v?([\d.]+)", output)
    if version is None:
        return MpiInstallation(why_not="mpirun is not that of Open MPI")
    try:
        _mpirun(2, "import mpi4py.MPI", seconds=_TRIAL_SECONDS)
    except FaultError as error:
        return MpiInstallation(why_not=str(error))
    return MpiInstallation(name=f"Open MPI {version[1]}")


def launch(ranks: int, nbytes: int, blocks: int) -> list[list[dict[str, list[float]]]]:
    """Run ``times.time_blocks`` with MPI on ``ranks`` workers; return what each returned.

    Raises:
        FaultError: the workers failed; it contains the end of their output.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-mpi-") as folder:
        _mpirun(ranks, _MAIN, str(nbytes), str(blocks), folder, seconds=_SECONDS)
        texts = [Path(folder, f"{rank}.json").read_text("utf-8") for rank in range(ranks)]
    return [json.loads(text) for text in texts]


def _mpirun(ranks: int, code: str, *words: str, seconds: float) -> None:
    command = ["mpirun", "-n", str(ranks), *_OPTIONS, *_SETTINGS, sys.executable, "-c", code]
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, *words],
        env={**os.environ, **store},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        try:
            output, _ = running.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise FaultError(f"mpirun -n {ranks} did not end within {seconds:g} s") from None
        finally:
            running.terminate()  # it takes its workers with it; killed, it would not
    if running.returncode:
        own = output.partition("-----")[0].strip() or output.strip()  # before mpirun's epilogue
        tail = " / ".join(own.splitlines()[-8:])
        raise FaultError(f"mpirun -n {ranks} ended with {running.returncode}: {tail}")


def work(nbytes: str, blocks: str, folder: str) -> None:
    """Time all contenders in a worker of ``mpirun``, and write the times to a file."""
    mpi: Any = import_module("mpi4py.MPI")
    world = mpi.COMM_WORLD
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    times = time_blocks(int(nbytes), int(blocks), partial(prepare, mpi))
    Path(folder, f"{world.rank}.json").write_text(json.dumps(times), "utf-8")
    dist.destroy_process_group()


def prepare(mpi: Any, name: str, numel: int) -> Call:
    """Return MPI's call of a collective of torch, on ``numel`` elements.

    MPI has only flat buffers, so torch's forms with lists are compared with these, and an
    all_reduce of a shared bucket with MPI's only Allreduce.
    """
    return _CALLS[name](mpi, numel, numel // mpi.COMM_WORLD.size)


def _buffer(mpi: Any, numel: int) -> list[Any]:
    """Return zeros, in the form that mpi4py takes."""
    import torch

    return [mpi.buffer(torch.zeros(numel)), mpi.FLOAT]


def _all_reduce(mpi: Any, numel: int, each: int) -> Call:
    return partial(mpi.COMM_WORLD.Allreduce, mpi.IN_PLACE, _buffer(mpi, numel))


def _broadcast(mpi: Any, numel: int, each: int) -> Call:
    return partial(mpi.COMM_WORLD.Bcast, _buffer(mpi, numel), 0)


def _reduce(mpi: Any, numel: int, each: int) -> Call:
    x, world = _buffer(mpi, numel), mpi.COMM_WORLD
    buffers = (mpi.IN_PLACE, x) if world.rank == 0 else (x, None)
    return partial(world.Reduce, *buffers, mpi.SUM, 0)


def _all_gather(mpi: Any, numel: int, each: int) -> Call:
    world = mpi.COMM_WORLD
    return partial(world.Allgather, _buffer(mpi, each), _buffer(mpi, each * world.size))


def _reduce_scatter(mpi: Any, numel: int, each: int) -> Call:
    world = mpi.COMM_WORLD
    whole, part = _buffer(mpi, each * world.size), _buffer(mpi, each)
    return partial(world.Reduce_scatter_block, whole, part)


def _all_to_all(mpi: Any, numel: int, each: int) -> Call:
    buffers = (_buffer(mpi, each * mpi.COMM_WORLD.size) for _ in range(2))
    return partial(mpi.COMM_WORLD.Alltoall, *buffers)


def _gather(mpi: Any, numel: int, each: int) -> Call:
    world = mpi.COMM_WORLD
    whole = _buffer(mpi, each * world.size) if world.rank == 0 else None
    return partial(world.Gather, _buffer(mpi, each), whole, 0)


def _scatter(mpi: Any, numel: int, each: int) -> Call:
    world = mpi.COMM_WORLD
    whole = _buffer(mpi, each * world.size) if world.rank == 0 else None
    return partial(world.Scatter, whole, _buffer(mpi, each), 0)


def _send_recv(mpi: Any, numel: int, each: int) -> Call:
    x, world = _buffer(mpi, numel // 2), mpi.COMM_WORLD

    def call() -> None:
        if world.rank == 0:
            world.Send(x, 1)
            world.Recv(x, 1)
        elif world.rank == 1:
            world.Recv(x, 0)
            world.Send(x, 0)

    return call


_CALLS: dict[str, Callable[[Any, int, int], Call]] = {
    "all_reduce": _all_reduce,
    "all_reduce of a shared bucket": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "send and recv": _send_recv,
}
