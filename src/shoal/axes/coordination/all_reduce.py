"""All-reduce: all workers get the mean over all workers, and all have the same role.

References:
    Patarasuk & Yuan, `Bandwidth optimal all-reduce algorithms
    <https://doi.org/10.1016/j.jpdc.2008.09.002>`_, 2009.
    Sergeev & Del Balso, `Horovod <https://arxiv.org/abs/1802.05799>`_, 2018.
"""

from __future__ import annotations

from shoal.axes.coordination.coordination import Coordination, complete


def all_reduce() -> Coordination:
    """Average over all workers by a collective."""
    return Coordination("all_reduce", "collective", "gradient", complete)
