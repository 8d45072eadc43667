"""Native: let torch's backend (gloo, NCCL) choose the route.

It is the base case: what one gets by not asking. The route is the backend's own and may change with
message size and version, so there are no rounds to prove, and its price is an assumption.

References:
    Thakur, Rabenseifner & Gropp, `Optimization of Collective Communication Operations in MPICH
    <https://doi.org/10.1177/1094342005051521>`_, 2005 (how libraries choose by size).
"""

from __future__ import annotations

from shoal.axes.collectives.collective import Collective


def native() -> Collective:
    """Whatever all-reduce torch's backend runs."""
    return Collective("native", rounds=None, chunks=_one)


def _one(world: int) -> int:
    return 1
