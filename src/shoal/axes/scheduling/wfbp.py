"""Wait-free back-propagation: a gradient is sent while backward computes those of earlier layers.

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
FIRST = 2**20  # bytes; as in DDP the first bucket is small, so that the first message starts early


def wfbp(fusion: int = DEFAULT) -> Schedule:
    """Send gradients during backward, fused into messages of about ``fusion`` bytes.

    Args:
        fusion: bytes at which a message is full; with 1 every tensor is a message of its own.

    Example: ``wfbp``, ``wfbp(1)``.
    """
    check_nbytes("wfbp", fusion)

    def plan(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
        return tuple(message(layers, group) for group in fuse(layers, FIRST, fusion))

    name = "wfbp" if fusion == DEFAULT else f"wfbp({nbytes_text(fusion)})"
    return Schedule(name, plan, overlaps=True)
