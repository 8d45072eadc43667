"""Time collectives side by side: shoal, its twin, gloo, MPI where there is one, and a copy.

One set of workers holds every contender, and they take turns block by block, so that what disturbs
the machine falls on all. Two neighbouring blocks have opposite orders: whoever came before another
comes after it, for every two of them. The next two begin with the next contender. A block's time is
the slowest rank's; the copy is one ``memmove`` of the message by rank 0, while the others sleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import memmove

from shoal.bench.blocks import slowest
from shoal.bench.collective_calls import COLLECTIVES, Call, Collective, Group
from shoal.testing.processes import run_workers

SHOAL, TWIN, GLOO, MPI, COPY = "shoal", "twin", "gloo", "mpi", "copy"
Times = Mapping[str, Sequence[float]]
"""Seconds of a call of each contender, block by block."""
Foreign = Callable[[str, int], Call]
"""From a collective's name and a size in numbers, the same call outside of torch."""
_BLOCK_NBYTES, _CALLS = 16 << 20, 20  # of a block: as many calls as move so much, but not more


def measure(ranks: int, nbytes: int, blocks: int, *, mpi: bool = False) -> dict[str, Times]:
    """Times of every collective, by its name, for one size, in one set of workers.

    Args:
        ranks: how many take part.
        nbytes: of the message.
        blocks: how often each contender is timed.
        mpi: have the workers started by ``mpirun``, so that MPI takes its turns too.
    """
    if mpi:
        from shoal.bench.mpi_peer import launch

        workers = launch(ranks, nbytes, blocks)
    else:
        workers = run_workers(ranks, time_blocks, nbytes, blocks, seconds=1800)
    found: dict[str, Times] = {}
    for collective, each in zip(COLLECTIVES, zip(*workers, strict=True), strict=True):
        found[collective.name] = {who: slowest([one[who] for one in each]) for who in each[0]}
    return found


def time_blocks(
    nbytes: int, blocks: int, foreign: Foreign | None = None
) -> list[dict[str, list[float]]]:
    """What a worker does: for each collective, the seconds of each contender."""
    import torch.distributed as dist

    from shoal.wire.shm import register

    register()
    dist.init_process_group("shoal")
    world, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    if world is None or gloo is None:
        raise RuntimeError("no process group was made")
    times = max(1, min(_CALLS, _BLOCK_NBYTES // nbytes))
    found = []
    for collective in COLLECTIVES:
        calls = _contenders(collective, nbytes, world, gloo)
        if foreign is not None:
            calls[MPI] = foreign(collective.name, nbytes // 4)
        found.append(_in_turns(calls, times, blocks))
    return found


def _contenders(collective: Collective, nbytes: int, world: Group, gloo: Group) -> dict[str, Call]:
    groups = {SHOAL: world, TWIN: world, GLOO: gloo}
    calls = {who: collective.prepare(group, nbytes // 4) for who, group in groups.items()}
    return {**calls, COPY: _copier(nbytes) if world.rank() == 0 else lambda: None}


def _copier(nbytes: int) -> Call:
    import torch

    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    return lambda: memmove(target.data_ptr(), source.data_ptr(), nbytes)


def turns(block: int, count: int) -> list[int]:
    """Who of ``count`` runs when in a block.

    >>> turns(0, 3), turns(1, 3), turns(2, 3)
    ([0, 1, 2], [2, 1, 0], [1, 2, 0])
    """
    order = [(block // 2 + place) % count for place in range(count)]
    return order if block % 2 == 0 else order[::-1]


def _in_turns(calls: Mapping[str, Call], times: int, blocks: int) -> dict[str, list[float]]:
    """Seconds a call of each, in each block; the first two blocks are not counted."""
    import torch.distributed as dist

    names = list(calls)
    seconds: dict[str, list[float]] = {who: [] for who in names}
    for block in range(-2, blocks):
        for which in turns(block, len(names)):
            dist.barrier()
            seconds[names[which]].append(_seconds(calls[names[which]], times))
    return {who: taken[2:] for who, taken in seconds.items()}


def _seconds(call: Call, times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begin) / times
