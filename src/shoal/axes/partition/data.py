"""Data parallelism: every worker holds the whole model and a part of the batch.

References:
    Li et al., `PyTorch Distributed <https://arxiv.org/abs/2006.15704>`_, 2020.
"""

from __future__ import annotations

from shoal.axes.partition.partition import Partition, degree


def data(replicas: int | None = None) -> Partition:
    """Replicate the model and cut the batch.

    Args:
        replicas: their number; by default as many as the ranks allow.

    Example: ``data``, ``data(1)``, ``data(4)``.
    """
    return Partition(replicas if replicas is None else degree("data", replicas))
