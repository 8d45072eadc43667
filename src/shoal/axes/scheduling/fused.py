"""Fusion buffers: gradients fill a buffer in the order of backward, and a full buffer is sent.

Unlike in ``wfbp``, a buffer of several tensors has at most ``threshold`` bytes, and the first
buffer has the same limit as the others.

References:
    Sergeev & Del Balso, `Horovod <https://arxiv.org/abs/1802.05799>`_, 2018 (tensor fusion).
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.axes.scheduling.kit.grouping import fill, message
from shoal.axes.scheduling.schedule import Cost, Layer, Schedule, Task
from shoal.notation import check_nbytes, nbytes_text

DEFAULT = 64 * 2**20


def fused(threshold: int = DEFAULT) -> Schedule:
    """Send gradients during backward, in buffers of at most ``threshold`` bytes.

    Args:
        threshold: largest number of bytes of a buffer; a tensor with more bytes is sent alone.

    Example: ``fused``, ``fused(4KB)``.
    """
    check_nbytes("fused", threshold)

    def plan(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
        return tuple(message(layers, group) for group in fill(layers, threshold))

    name = "fused" if threshold == DEFAULT else f"fused({nbytes_text(threshold)})"
    return Schedule(name, plan, overlaps=True)
