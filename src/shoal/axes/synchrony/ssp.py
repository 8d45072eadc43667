"""Stale synchronous: the fastest may be ``bound`` clocks ahead of the slowest.

References:
    Ho et al., `More effective distributed ML via a stale synchronous parallel parameter server
    <https://papers.nips.cc/paper/2013/hash/b7bb35b9c6ca2aee2df08cf09d7016c2-Abstract.html>`_, 2013.
"""

from __future__ import annotations

from shoal.axes.synchrony.synchrony import Synchrony
from shoal.errors import BadArgument


def ssp(bound: int) -> Synchrony:
    """Wait only when more than ``bound`` steps ahead of the slowest worker.

    Args:
        bound: 0 reads the same models as bsp; more waits less and reads older models.

    Example: ``ssp(0)``, ``ssp(2)``.
    """
    if isinstance(bound, bool) or not isinstance(bound, int) or not 0 <= bound < 2**53:
        raise BadArgument(f"ssp({bound})", "the bound must be a whole number >= 0; asp has none")
    return Synchrony(f"ssp({bound})", 1, float(bound))
