"""Time Open MPI in the suite ``collectives``, if Open MPI and mpi4py are installed.

The workers of a measurement are then started by ``mpirun``. Each has the process groups of torch
and MPI's COMM_WORLD, so that all contenders take turns in the same processes. Nothing in Shoal
needs MPI; without it the suite measures the other contenders only.

MPI waits by polling. ``mpi_yield_when_idle`` makes it yield the core while it polls, which is
necessary if ranks share cores. Processes are not bound to cores, just as without ``mpirun``.
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
    """The name of MPI with its version, or the reason why it cannot be measured."""

    name: str = ""
    why_not: str = ""


@lru_cache(maxsize=1)
def find_mpi() -> MpiInstallation:
    """Return the name of the installed Open MPI, after a trial run, or why it cannot be used."""
    if find_spec("mpi4py") is None:
        return MpiInstallation(why_not="mpi4py is not installed (pip install mpi4py)")
    if shutil.which("mpirun") is None:
        return MpiInstallation(why_not="there is no mpirun (Debian: apt-get install openmpi-bin)")
    output = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    version = re.search(r"Open MPI\)? v?([\d.]+)", output)
    if version is None:
        return MpiInstallation(why_not="mpirun does not belong to Open MPI")
    try:
        _mpirun(2, "import mpi4py.MPI", seconds=_TRIAL_SECONDS)
    except FaultError as error:
        return MpiInstallation(why_not=str(error))
    return MpiInstallation(name=f"Open MPI {version[1]}")


def launch(ranks: int, nbytes: int, blocks: int) -> list[list[dict[str, list[float]]]]:
    """Run ``times.time_blocks`` in ``ranks`` workers of mpirun; return the result of each rank.

    Raises:
        FaultError: the workers took too long or failed. After a failure, the message contains the
            end of their output.
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
            running.terminate()  # not kill: on SIGTERM mpirun also ends its workers
    if running.returncode:
        own = output.partition("-----")[0].strip() or output.strip()  # without mpirun's own text
        tail = " / ".join(own.splitlines()[-8:])
        raise FaultError(f"mpirun -n {ranks} ended with exit code {running.returncode}: {tail}")


def work(nbytes: str, blocks: str, folder: str) -> None:
    """Time all contenders in a worker of ``mpirun``; write the times to ``folder/<rank>.json``."""
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
    """Return a function that calls the MPI collective for the torch collective ``name``.

    MPI has only flat buffers, so torch's collectives with lists of tensors and with one tensor are
    compared with the same MPI call. The same is true of all_reduce with and without a shared
    bucket.
    """
    world, each = mpi.COMM_WORLD, numel // mpi.COMM_WORLD.size
    root = world.rank == 0
    whole, part, flat = (partial(_buffer, mpi, n) for n in (numel, each, each * world.size))

    def reduce() -> Call:
        buffers = (mpi.IN_PLACE, whole()) if root else (whole(), None)
        return partial(world.Reduce, *buffers, mpi.SUM, 0)

    calls: dict[str, Callable[[], Call]] = {
        "all_reduce": lambda: partial(world.Allreduce, mpi.IN_PLACE, whole()),
        "broadcast": lambda: partial(world.Bcast, whole(), 0),
        "reduce": reduce,
        "all_gather": lambda: partial(world.Allgather, part(), flat()),
        "reduce_scatter": lambda: partial(world.Reduce_scatter_block, flat(), part()),
        "all_to_all": lambda: partial(world.Alltoall, flat(), flat()),
        "gather": lambda: partial(world.Gather, part(), flat() if root else None, 0),
        "scatter": lambda: partial(world.Scatter, flat() if root else None, part(), 0),
        "send and recv": lambda: partial(_send_recv, world, _buffer(mpi, numel // 2)),
    }
    return calls[name.removesuffix("_single").removesuffix(" of a shared bucket")]()


def _buffer(mpi: Any, numel: int) -> list[Any]:
    """Return a buffer of zeros as mpi4py expects it: [memory, type]."""
    import torch

    return [mpi.buffer(torch.zeros(numel)), mpi.FLOAT]


def _send_recv(world: Any, x: list[Any]) -> None:
    if world.rank == 0:
        world.Send(x, 1)
        world.Recv(x, 1)
    elif world.rank == 1:
        world.Recv(x, 0)
        world.Send(x, 0)
