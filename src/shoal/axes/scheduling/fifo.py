"""FIFO: all gradients are sent after backward, so communication does not overlap with it.

References:
    Shi et al., `A quantitative survey of communication optimizations in distributed deep learning
    <https://arxiv.org/abs/2005.13247>`_, 2021 (BSP without overlap).
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.axes.scheduling.kit.grouping import fuse, whole
from shoal.axes.scheduling.schedule import Cost, Event, Layer, Schedule, Task
from shoal.notation import check_nbytes, nbytes_text

DEFAULT = 25 * 2**20


def fifo(fusion: int = DEFAULT) -> Schedule:
    """Send all gradients after backward, fused into messages of about ``fusion`` bytes.

    Args:
        fusion: bytes at which a message is full; with 1 every tensor is a message of its own.

    Example: ``fifo``, ``fifo(1)``.
    """
    check_nbytes("fifo", fusion)

    def plan(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
        ready, due = Event("backward", 0), Event("update")
        return tuple(
            Task(tuple(whole(layers, i) for i in group), "reduce", ready, due)
            for group in fuse(layers, fusion, fusion)
        )

    name = "fifo" if fusion == DEFAULT else f"fifo({nbytes_text(fusion)})"
    return Schedule(name, plan)
