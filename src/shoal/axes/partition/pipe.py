"""Pipeline parallelism: the sequence of layers is divided into stages, one for each rank.

References:
    Huang et al., `GPipe <https://arxiv.org/abs/1811.06965>`_, 2019.
    Narayanan et al., `PipeDream <https://arxiv.org/abs/1806.03377>`_, 2019 (1F1B).
"""

from __future__ import annotations

from shoal.axes.partition.partition import Partition, degree


def pipe(stages: int) -> Partition:
    """Divide the sequence of layers into ``stages`` stages, through which micro-batches pass.

    Args:
        stages: number of stages. Train with ``run.step``, not with a loop of your own.

    Example: ``pipe(2)``.
    """
    return Partition(pipe=degree("pipe", stages))
