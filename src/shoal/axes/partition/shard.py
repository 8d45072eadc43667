"""Sharding (ZeRO-3, FSDP): parameters, gradients and optimizer state are cut.

References:
    Rajbhandari et al., `ZeRO <https://arxiv.org/abs/1910.02054>`_, 2020.
    Zhao et al., `PyTorch FSDP <https://arxiv.org/abs/2304.11277>`_, 2023 (what it runs on).
"""

from __future__ import annotations

from shoal.axes.partition.partition import Partition, degree


def shard(ranks: int) -> Partition:
    """Cut parameters, gradients and optimizer state over ``ranks`` ranks; gather layers when used.

    Args:
        ranks: their number; together they are one worker.

    Example: ``shard(2)``.
    """
    return Partition(shard=degree("shard", ranks))
