"""Tensor parallelism: single layers are cut, columns of one matrix, rows of the next.

References:
    Shoeybi et al., `Megatron-LM <https://arxiv.org/abs/1909.08053>`_, 2019.
"""

from __future__ import annotations

from shoal.axes.partition.partition import Partition, degree


def tensor(ranks: int) -> Partition:
    """Cut the matrices of each layer over ``ranks`` ranks.

    Args:
        ranks: their number; the model must say how its layers may be cut.

    Example: ``tensor(2)``.
    """
    return Partition(tensor=degree("tensor", ranks))
