"""What the next forward needs first goes first; a layer starts as soon as its own slices are there.

Tensors are cut into slices. Among those whose gradient exists, the slice of the earliest layer goes
first. Collectives must be entered in one order by all ranks, so that order is worked out in advance
from the layers' backward times and the cost of a message, not by a race at run time.

References:
    Jayarajan et al., `Priority-based parameter propagation <https://arxiv.org/abs/1905.03960>`_,
    2019 (P3).
    Peng et al., `ByteScheduler <https://doi.org/10.1145/3341301.3359642>`_, 2019.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from shoal.axes.scheduling.schedule import Cost, Event, Layer, Schedule, Slice, Task
from shoal.notation import check_nbytes, nbytes_text

DEFAULT = 2**20


def priority(size: int = DEFAULT) -> Schedule:
    """Send slices of ``size`` bytes, those of the first layers first.

    Args:
        size: bytes a slice; P3 uses 50,000 numbers, ByteScheduler megabytes.

    Example: ``priority``, ``priority(256)``.
    """
    check_nbytes("priority", size)

    def plan(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
        return tuple(
            Task((piece,), "reduce", Event("backward", layer), Event("forward", layer), layer)
            for layer, piece in order(layers, cost, size)
        )

    name = "priority" if size == DEFAULT else f"priority({nbytes_text(size)})"
    return Schedule(name, plan, overlaps=True, slices=True, early=True)


def order(layers: Sequence[Layer], cost: Cost, size: int) -> Iterator[tuple[int, Slice]]:
    """Serve one link: whenever it is free, the ready slice of the earliest layer goes."""
    now = done = 0.0
    waiting: list[tuple[int, Slice]] = []
    backward = iter(reversed(range(len(layers))))
    upcoming = next(backward, None)
    while waiting or upcoming is not None:
        while upcoming is not None and (not waiting or done + layers[upcoming].backward <= now):
            done += layers[upcoming].backward
            now = max(now, done) if not waiting else now
            for piece in cut(layers, upcoming, size):
                heapq.heappush(waiting, (upcoming, piece))
            upcoming = next(backward, None)
        layer, piece = heapq.heappop(waiting)
        now += cost(piece.stop - piece.start)
        yield layer, piece


def cut(layers: Sequence[Layer], index: int, size: int) -> Iterator[Slice]:
    """Slices of one layer; a layer without bytes is one empty slice."""
    nbytes = layers[index].nbytes
    size = max(16, size - size % 16)  # whole numbers of every type
    for start in range(0, max(nbytes, 1), size):
        yield Slice(index, start, min(start + size, nbytes))
