"""Stale synchronous parallel: a worker may be up to ``bound`` steps ahead of the slowest.

References:
    Ho et al., `More effective distributed ML via a stale synchronous parallel parameter server
    <https://papers.nips.cc/paper/2013/hash/b7bb35b9c6ca2aee2df08cf09d7016c2-Abstract.html>`_, 2013.
"""

from __future__ import annotations

from shoal.axes.synchrony.synchrony import Synchrony
from shoal.errors import BadArgument
from shoal.notation import is_whole


def ssp(bound: int) -> Synchrony:
    """Let a worker wait only while it is more than ``bound`` steps ahead of the slowest worker.

    Args:
        bound: with 0, workers read the same models as with bsp. With a higher bound, a worker may
            read an older model.

    Example: ``ssp(0)``, ``ssp(2)``.
    """
    if not is_whole(bound, 0, 2**53 - 1):
        raise BadArgument(f"ssp({bound})", "bound must be a whole number >= 0; or use asp")
    return Synchrony(f"ssp({bound})", 1, float(bound))
