"""MG-WFBP: merge a gradient with the next one if waiting for it takes less than a startup.

The startup is the part of a message's time that does not depend on its size. The layers are visited
from the last to the first. Let tau_c be the time at which the message of layer l could start, t_c
its duration, and r the time at which the gradient of layer l - 1 is ready:

1. If r >= tau_c + t_c, the message arrives before that gradient is ready, so do not merge the two.
2. If r < tau_c, the link is still busy when that gradient is ready, so merging saves a startup.
3. Otherwise merging costs a wait of r - tau_c and saves a startup; merge if the wait is shorter.

The times of layers and messages are measured in the first steps, and again during training.

Differs from the paper: each parameter is a layer, because gradients become ready one by one. The
startup is the time of a message of zero bytes on the measured link.

References:
    Shi, Chu & Li, `MG-WFBP <https://arxiv.org/abs/1811.11141>`_, 2019, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.axes.scheduling.kit.grouping import message
from shoal.axes.scheduling.schedule import Cost, Layer, Schedule, Task


def merged() -> Schedule:
    """Send gradients during backward, and merge them if this is faster by measured times."""

    def plan(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
        return tuple(message(layers, group) for group in merge(layers, cost))

    return Schedule("merged", plan, overlaps=True, measures="times")


def merge(layers: Sequence[Layer], cost: Cost) -> Iterator[tuple[int, ...]]:
    """Yield groups of adjacent layers to merge, as layer indices, from the last to the first."""
    startup = cost(0)
    ready = free = 0.0  # the times at which the layer's gradient is ready, and the link is free
    group: list[int] = []
    size = 0
    for index in reversed(range(len(layers))):
        group.append(index)
        size += layers[index].nbytes
        ready += layers[index].backward
        begins = max(free, ready)  # tau_c
        ends = begins + cost(size)
        upcoming = ready + layers[index - 1].backward if index else float("inf")  # r
        if upcoming < ends and upcoming - begins < startup:
            continue
        yield tuple(group)
        group, size, free = [], 0, ends
