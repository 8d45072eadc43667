"""What the next forward needs first goes first; a layer starts as soon as its own slices are there.

Tensors are cut into slices, and small neighbours share one. Among those whose gradient exists, the
slice of the earliest layer goes first. Collectives must be entered in one order by all ranks, so
that order is worked out in advance, from the layers' backward times and the cost of a message as
the first steps measured them, not by a race at run time.

What is under way cannot be overtaken, so little of it keeps the order; but a link that always has
the next message waiting is never idle. ByteScheduler's credit is the compromise: so many bytes may
be under way at once.

References:
    Jayarajan et al., `Priority-based parameter propagation <https://arxiv.org/abs/1905.03960>`_,
    2019 (P3).
    Peng et al., `ByteScheduler <https://doi.org/10.1145/3341301.3359642>`_, 2019.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from shoal.axes.scheduling.kit.grouping import blocks, cut
from shoal.axes.scheduling.schedule import Cost, Event, Layer, Schedule, Slice, Task
from shoal.errors import BadArgument
from shoal.notation import check_nbytes, nbytes_text

DEFAULT = 4 * 2**20


def priority(size: int = DEFAULT, credit: int = 0) -> Schedule:
    """Send slices of ``size`` bytes, those of the first layers first.

    Args:
        size: bytes a slice; P3 uses 50,000 numbers, ByteScheduler megabytes, since every message
            costs something by itself.
        credit: bytes that may be under way at once, counted in slices; 0 leaves it to the backend.

    Example: ``priority``, ``priority(256)``, ``priority(256, credit=512)``.
    """
    check_nbytes("priority", size)
    told = [nbytes_text(size)] if size != DEFAULT or credit else []
    if credit:
        told.append(f"credit={nbytes_text(credit) if isinstance(credit, int) else credit}")
        check_nbytes("priority", credit)
        if credit < size:
            raise BadArgument(f"priority({', '.join(told)})", "the credit is at least one slice")
    window = credit // size

    def plan(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
        return tuple(by_need(layers, cost, blocks(layers, size), window=max(1, window)))

    name = f"priority({', '.join(told)})" if told else "priority"
    return Schedule(
        name,
        plan,
        overlaps=True,
        slices=True,
        early=True,
        window=window,
        measures="times",
        reorders=True,
    )


def by_need(
    layers: Sequence[Layer],
    cost: Cost,
    messages: Iterable[tuple[Slice, ...]],
    *,
    urgency: Callable[[int], float] = float,
    window: int = 1,
) -> Iterator[Task]:
    """Serve one link: whenever there is room, the most urgent message that is ready goes.

    Args:
        layers: in forward order, with their seconds.
        cost: of a message.
        messages: in the order of backward; each is ready with the earliest of its layers.
        urgency: of that layer, least first; by default the earliest layer's.
        window: messages that are under way at once, one served after the other.
    """
    left = deque(messages)
    there = dict(zip(reversed(range(len(layers))), accumulate(_backward(layers)), strict=True))
    waiting: list[tuple[float, int, tuple[Slice, ...]]] = []
    now = free = 0.0
    under_way: deque[float] = deque()  # when each is done
    while waiting or left:
        if not waiting:
            now = max(now, there[left[0][-1].layer])
        while left and there[(layer := left[0][-1].layer)] <= now:
            heapq.heappush(waiting, (urgency(layer), layer, left.popleft()))
        _, layer, slices = heapq.heappop(waiting)
        task = Task(slices, "reduce", Event("backward", layer), Event("forward", layer), layer)
        free = max(free, now) + cost(task.nbytes)
        under_way.append(free)
        if len(under_way) == window:
            now = max(now, under_way.popleft())
        yield task


def slices(layers: Sequence[Layer], size: int) -> Iterator[tuple[Slice, ...]]:
    """Every layer in slices of ``size`` bytes, a message each, from the last layer to the first."""
    for index in reversed(range(len(layers))):
        yield from ((piece,) for piece in cut(layers, index, size))


def _backward(layers: Sequence[Layer]) -> Iterator[float]:
    return (layer.backward for layer in reversed(layers))
