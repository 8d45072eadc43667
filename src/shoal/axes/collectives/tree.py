"""Tree all-reduce: partial sums are sent up a binomial tree to rank 0, and the sum is sent down.

In round ``k`` on the way up, half of the ranks that still have a partial sum send it to the rank
that is lower by ``2^k``. There are ``ceil(log2 world)`` rounds up and as many down, each with the
whole message. There are few messages, but most links are idle: the tree is better than a ring for
small messages, and worse for large ones.

References:
    Thakur, Rabenseifner & Gropp, `Optimization of Collective Communication Operations in MPICH
    <https://doi.org/10.1177/1094342005051521>`_, 2005.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.axes.collectives.collective import Collective, Copy, Round


def tree() -> Collective:
    """Reduce up a binomial tree and broadcast down it, in few messages of full size."""
    return Collective("tree", rounds=_rounds)


def _rounds(world: int) -> Iterator[Round]:
    levels = [1 << k for k in range((world - 1).bit_length())]
    for d in levels:
        yield tuple(Copy(rank, rank - d, 0, True) for rank in range(d, world, 2 * d))
    for d in reversed(levels):
        yield tuple(Copy(rank - d, rank, 0, False) for rank in range(d, world, 2 * d))
