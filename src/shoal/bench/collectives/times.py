"""Time collectives in a worker: on shoal twice (once as ``twin``), gloo, perhaps MPI, and a copy.

The same workers run all contenders in turns, block by block, so that a disturbance of the machine
affects all contenders. Blocks 2i and 2i + 1 have opposite orders; block 2i begins with contender i
(modulo the number of contenders). The copy is one ``memmove`` of the message by rank 0, while
the other ranks wait in a barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import memmove

from shoal.bench.blocks import time_in_turns
from shoal.bench.collectives.calls import COLLECTIVES, Call

SHOAL, TWIN, GLOO, MPI, COPY = "shoal", "twin", "gloo", "mpi", "copy"
Times = Mapping[str, Sequence[float]]
"""Contender -> seconds of a call, block by block."""
PrepareMpi = Callable[[str, int], Call]
"""Takes the name of a collective and a number of elements; returns a function that calls MPI."""
_BLOCK_NBYTES, _CALLS = 16 << 20, 20  # limits of bytes and of calls in a block of several calls


def time_blocks(
    nbytes: int, blocks: int, prepare_mpi: PrepareMpi | None = None
) -> list[dict[str, list[float]]]:
    """Join the group; return, for each collective, the seconds of each contender in this worker."""
    import torch.distributed as dist

    from shoal.wire.shm import register

    register()
    dist.init_process_group("shoal")
    world, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    if world is None or gloo is None:
        raise RuntimeError("torch made no process group for the shoal backend or for gloo")
    repeats = max(1, min(_CALLS, _BLOCK_NBYTES // nbytes))
    groups = {SHOAL: world, TWIN: world, GLOO: gloo}
    times = []
    for collective in COLLECTIVES:
        calls = {who: collective.prepare(group, nbytes // 4) for who, group in groups.items()}
        calls[COPY] = _copier(nbytes) if world.rank() == 0 else lambda: None
        if prepare_mpi is not None:
            calls[MPI] = prepare_mpi(collective.name, nbytes // 4)
        times.append(time_in_turns(calls, repeats, blocks))
    return times


def _copier(nbytes: int) -> Call:
    import torch

    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    return lambda: memmove(target.data_ptr(), source.data_ptr(), nbytes)
