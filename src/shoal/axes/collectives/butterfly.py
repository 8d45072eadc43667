"""Butterfly all-reduce (recursive doubling): in each round, pairs of ranks exchange their sums.

In round ``k`` partners are ``2^k`` ranks apart, and afterwards each rank has the sum over a group
of ``2^(k + 1)`` ranks. So there are ``log2 world`` rounds, each with the whole message. No
route has fewer rounds, so it is best for small messages. Two partners compute ``a + b`` and
``b + a``, which have the same bits.

If the number of workers is not a power of two, two more messages are needed
(:mod:`shoal.axes.collectives.kit.fold`).

References:
    Thakur, Rabenseifner & Gropp, `Optimization of Collective Communication Operations in MPICH
    <https://doi.org/10.1177/1094342005051521>`_, 2005 (recursive doubling).
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.axes.collectives.collective import Collective, Copy, Round
from shoal.axes.collectives.kit.fold import folded


def butterfly() -> Collective:
    """Exchange sums with partners, each twice as far away as the one before.

    This takes the fewest messages, but many bytes.
    """
    return Collective("butterfly", rounds=_rounds)


def _rounds(world: int) -> Iterator[Round]:
    return folded(world, 1, _swaps)


def _swaps(power: int) -> Iterator[Round]:
    for k in range(power.bit_length() - 1):
        yield tuple(Copy(rank, rank ^ (1 << k), 0, True) for rank in range(power))
