"""Data parallelism: every worker has a replica of the model and computes a part of the batch.

References:
    Li et al., `PyTorch Distributed <https://arxiv.org/abs/2006.15704>`_, 2020.
"""

from __future__ import annotations

from shoal.axes.partition.partition import Partition, degree


def data(replicas: int | None = None) -> Partition:
    """Replicate the model and divide the batch among the replicas.

    Args:
        replicas: number of replicas. The default is the number of ranks / ranks per replica.

    Example: ``data``, ``data(1)``, ``data(4)``.
    """
    return Partition(replicas if replicas is None else degree("data", replicas))
