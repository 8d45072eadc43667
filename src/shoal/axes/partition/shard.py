"""Sharding (ZeRO-3, FSDP): each rank has a shard of parameters, gradients and optimizer state.

References:
    Rajbhandari et al., `ZeRO <https://arxiv.org/abs/1910.02054>`_, 2020.
    Zhao et al., `PyTorch FSDP <https://arxiv.org/abs/2304.11277>`_, 2023 (used here).
"""

from __future__ import annotations

from shoal.axes.partition.partition import Partition, degree


def shard(ranks: int) -> Partition:
    """Shard parameters, gradients and optimizer state over ``ranks`` ranks.

    The parameters of a layer are gathered before the layer is used.

    Args:
        ranks: number of ranks, which together are one worker.

    Example: ``shard(2)``.
    """
    return Partition(shard=degree("shard", ranks))
