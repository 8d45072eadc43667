"""Priority scheduling: the gradients that the next forward needs first are sent first.

Large tensors are cut into slices, and small adjacent tensors are fused into one message. Of all
messages whose gradients are ready, the one of the earliest layer is sent first. A layer's forward
starts as soon as its own gradients have arrived. All ranks must start collectives in the same
order, so the order is computed in advance from measured times of backward and of messages.

A message in transfer cannot be overtaken, so the order is best with few messages in transfer. But
with too few, the link is idle between two messages. ByteScheduler's credit is the compromise: the
number of bytes that may be in transfer at once.

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
        size: bytes per slice. P3 uses slices of 50,000 numbers; ByteScheduler uses megabytes,
            because every message has a startup cost.
        credit: bytes in transfer at once, rounded down to whole slices. With 0 the runtime decides.

    Example: ``priority``, ``priority(256)``, ``priority(256, credit=512)``.
    """
    check_nbytes("priority", size)
    options = [nbytes_text(size)] if size != DEFAULT or credit else []
    if credit:
        options.append(f"credit={nbytes_text(credit) if isinstance(credit, int) else credit}")
        check_nbytes("priority", credit)
        if credit < size:
            call = f"priority({', '.join(options)})"
            raise BadArgument(call, "credit must be at least as large as one slice")
    window = credit // size

    def plan(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
        return tuple(by_need(layers, cost, blocks(layers, size), window=max(1, window)))

    name = f"priority({', '.join(options)})" if options else "priority"
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
    """Yield messages as tasks, in the order in which one link with these times sends them.

    Whenever fewer than ``window`` messages are in transfer, the most urgent ready one is sent.

    Args:
        layers: in forward order, with their seconds.
        cost: nbytes -> seconds of a message.
        messages: in the order of backward; each is ready after backward of its earliest layer.
        urgency: index of that layer -> a number. The message with the lowest number is sent first.
            By default the number is the index.
        window: largest number of messages in transfer. The link transfers one after the other.
    """
    pending = deque(messages)
    ends = accumulate(layer.backward for layer in reversed(layers))
    ready = dict(zip(reversed(range(len(layers))), ends, strict=True))  # layer -> seconds
    waiting: list[tuple[float, int, tuple[Slice, ...]]] = []
    now = free = 0.0
    arrivals: deque[float] = deque()  # the times at which the messages in transfer arrive
    while waiting or pending:
        if not waiting:
            now = max(now, ready[pending[0][-1].layer])
        while pending and ready[(layer := pending[0][-1].layer)] <= now:
            heapq.heappush(waiting, (urgency(layer), layer, pending.popleft()))
        _, layer, slices = heapq.heappop(waiting)
        task = Task(slices, "reduce", Event("backward", layer), Event("forward", layer), layer)
        free = max(free, now) + cost(task.nbytes)
        arrivals.append(free)
        if len(arrivals) == window:
            now = max(now, arrivals.popleft())
        yield task


def slices(layers: Sequence[Layer], size: int) -> Iterator[tuple[Slice, ...]]:
    """Yield a message for each slice of ``size`` bytes, from the last layer to the first."""
    for index in reversed(range(len(layers))):
        yield from ((piece,) for piece in cut(layers, index, size))
