"""DeAR: reduce-scatter during backward, all-gather during the next forward.

An all-reduce is a reduce-scatter and an all-gather. The reduce-scatter overlaps with backward. The
result is needed only when the next forward uses the layer, so the all-gather overlaps with the next
forward, and the first layers are gathered first.

Differs from the paper: a tensor larger than ``fusion`` bytes is cut, so that all messages have
about the same size. Gradients are gathered, not parameters, so every rank runs the whole update.

References:
    Zhang et al., `DeAR <https://arxiv.org/abs/2302.12445>`_, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.axes.scheduling.kit.grouping import blocks
from shoal.axes.scheduling.schedule import Cost, Event, Layer, Schedule, Task
from shoal.notation import check_nbytes, nbytes_text

DEFAULT = 8 * 2**20


def dear(fusion: int = DEFAULT) -> Schedule:
    """Reduce-scatter gradients during backward, all-gather them during the next forward.

    Args:
        fusion: bytes per message; smaller tensors are fused, larger ones are cut.

    Example: ``dear``, ``dear(256)``.
    """
    check_nbytes("dear", fusion)

    def plan(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
        scatters, gathers = [], []
        for slices in blocks(layers, fusion):
            first = slices[-1].layer
            done, needed = Event("backward", first), Event("forward", first)
            scatters.append(Task(slices, "scatter", done, needed, first))
            gathers.append(Task(slices, "gather", Event("backward", 0), needed, first))
        gathers.sort(key=lambda task: task.priority)  # slices of one layer keep their order
        return (*scatters, *gathers)

    name = "dear" if fusion == DEFAULT else f"dear({nbytes_text(fusion)})"
    return Schedule(name, plan, overlaps=True, slices=True, early=True, scatters=True)
