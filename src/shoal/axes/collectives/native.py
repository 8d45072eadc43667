"""Native: the all-reduce of torch's backend (gloo, NCCL, shoal).

It is the default. The backend chooses its algorithm, which may depend on the message size and the
version. So this route has no rounds that could be checked, and its cost is an assumption.

References:
    Thakur, Rabenseifner & Gropp, `Optimization of Collective Communication Operations in MPICH
    <https://doi.org/10.1177/1094342005051521>`_, 2005 (how libraries choose by size).
"""

from __future__ import annotations

from shoal.axes.collectives.collective import Collective


def native() -> Collective:
    """Use the all-reduce of torch's backend."""
    return Collective("native", rounds=None)
