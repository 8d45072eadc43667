"""MG-WFBP: merge a gradient with the next one if waiting for it takes less than a startup.

The rule goes from the last layer to the first. Let tau_c be the time at which the message of layer
l could start, t_c its duration, and r the time at which the gradient of layer l - 1 is ready:

1. r >= tau_c + t_c: the message has arrived by then; it is sent alone.
2. r < tau_c: the link is still busy when the next gradient is ready; merging saves a startup.
3. else: merging waits r - tau_c and saves a startup; merge if the wait is shorter.

Times of layers and link are measured in the first steps, and again during training.

Differs from the paper: layers are parameters, because gradients arrive one by one; the startup is
the measured time of a message of zero bytes.

References:
    Shi, Chu & Li, `MG-WFBP <https://arxiv.org/abs/1811.11141>`_, 2019, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.axes.scheduling.kit.grouping import message
from shoal.axes.scheduling.schedule import Cost, Layer, Schedule, Task


def merged() -> Schedule:
    """Send gradients during backward, merged where that saves time, by measured times."""

    def plan(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
        return tuple(message(layers, group) for group in merge(layers, cost))

    return Schedule("merged", plan, overlaps=True, measures="times")


def merge(layers: Sequence[Layer], cost: Cost) -> Iterator[tuple[int, ...]]:
    """Yield groups of adjacent layers, from the last layer to the first."""
    startup = cost(0)
    ready = free = 0.0  # when the gradient of the layer is ready; when the link is free
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
