"""MG-WFBP: merge a gradient with the next one when waiting for it costs less than a startup.

Walk from the last layer to the first, with tau_c the moment at which the message of layer l could
begin, t_c its seconds and r the moment at which the gradient of layer l - 1 is there:

1. r >= tau_c + t_c: the message is gone by then; it goes alone.
2. r < tau_c: the link is still busy when the next gradient comes; merging only saves a startup.
3. else: merging waits r - tau_c and saves a startup; merge if that is less.

Layer times and the link are measured in the first steps, and looked at again as training goes on.

Differs from the paper: layers are parameters, as gradients arrive one by one; the startup is what
the measured link asks for a message of no bytes.

References:
    Shi, Chu & Li, `MG-WFBP <https://arxiv.org/abs/1811.11141>`_, 2019, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.axes.scheduling.kit.grouping import message
from shoal.axes.scheduling.schedule import Cost, Layer, Schedule, Task


def merged() -> Schedule:
    """Send gradients during backward, merged by MG-WFBP's rule on measured times."""

    def plan(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
        return tuple(message(layers, group) for group in merge(layers, cost))

    return Schedule("merged", plan, overlaps=True, measures="times")


def merge(layers: Sequence[Layer], cost: Cost) -> Iterator[tuple[int, ...]]:
    """Groups of neighbours, from the last layer to the first."""
    startup = cost(0)
    there = free = 0.0  # when the layer's gradient is there; when the link is free
    group: list[int] = []
    size = 0
    for index in reversed(range(len(layers))):
        group.append(index)
        size += layers[index].nbytes
        there += layers[index].backward
        begins = max(free, there)  # tau_c
        ends = begins + cost(size)
        upcoming = there + layers[index - 1].backward if index else float("inf")  # r
        if upcoming < ends and upcoming - begins < startup:
            continue
        yield tuple(group)
        group, size, free = [], 0, ends
