"""Wait-free back-propagation: a gradient is sent while earlier layers still compute theirs.

References:
    Zhang et al., `Poseidon <https://arxiv.org/abs/1706.03292>`_, 2017 (WFBP).
    Li et al., `PyTorch Distributed <https://arxiv.org/abs/2006.15704>`_, 2020 (buckets of 25 MB).
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.axes.scheduling.kit.grouping import fuse, message
from shoal.axes.scheduling.schedule import Cost, Layer, Schedule, Task
from shoal.notation import check_nbytes, nbytes_text

DEFAULT = 25 * 2**20
FIRST = 2**20  # as in DDP: with a small first bucket the link starts early


def wfbp(fusion: int = DEFAULT) -> Schedule:
    """Send gradients during backward, fused into messages of ``fusion`` bytes.

    Args:
        fusion: the bucket size; 1 sends every tensor on its own.

    Example: ``wfbp``, ``wfbp(1)``.
    """
    check_nbytes("wfbp", fusion)

    def plan(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
        return tuple(message(layers, group) for group in fuse(layers, FIRST, fusion))

    name = "wfbp" if fusion == DEFAULT else f"wfbp({nbytes_text(fusion)})"
    return Schedule(name, plan, overlaps=True)
