"""Tree all-reduce: partial sums climb a binomial tree to the first worker, and the sum comes down.

In round ``k`` of the climb, half of those who still hold a partial sum hand it to one who is
``2^k`` below: ``ceil(log2 world)`` rounds up and as many down, of the whole message each. Few
messages, but most links idle: better than a ring for small messages, worse for large ones.

References:
    Thakur, Rabenseifner & Gropp, `Optimization of Collective Communication Operations in MPICH
    <https://doi.org/10.1177/1094342005051521>`_, 2005.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.axes.collectives.collective import Collective, Copy, Round


def tree() -> Collective:
    """Sums climb a binomial tree and come down again: few messages, each of the whole."""
    return Collective("tree", rounds=_rounds, chunks=_one)


def _one(world: int) -> int:
    return 1


def _rounds(world: int) -> Iterator[Round]:
    levels = [1 << k for k in range((world - 1).bit_length())]
    for d in levels:
        yield tuple(Copy(rank, rank - d, 0, True) for rank in range(d, world, 2 * d))
    for d in reversed(levels):
        yield tuple(Copy(rank - d, rank, 0, False) for rank in range(d, world, 2 * d))
