"""Tensor parallelism: matrices are divided among ranks, one by columns and the next by rows.

References:
    Shoeybi et al., `Megatron-LM <https://arxiv.org/abs/1909.08053>`_, 2019.
"""

from __future__ import annotations

from shoal.axes.partition.partition import Partition, degree


def tensor(ranks: int) -> Partition:
    """Divide the matrices of each layer among ``ranks`` ranks.

    Args:
        ranks: number of ranks. The model must declare how it is split (see ``shoal.models``).

    Example: ``tensor(2)``.
    """
    return Partition(tensor=degree("tensor", ranks))
