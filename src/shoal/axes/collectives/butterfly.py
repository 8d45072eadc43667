"""Butterfly all-reduce (recursive doubling): in each round, pairs of ranks exchange their sums.

In round ``k`` partners are ``2^k`` ranks apart, and afterwards each rank has the sum over a group
of ``2^(k + 1)`` ranks. So there are ``log2 world`` rounds, each with the whole message: the fewest
rounds possible, which is best for small messages. Two partners compute ``a + b`` and ``b + a``,
which are the same bits.

It works for any number of workers: if that is not a power of two, two more messages are needed
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
    """Exchange sums with a partner, each round twice as far away: fewest messages, many bytes."""
    return Collective("butterfly", rounds=_rounds)


def _rounds(world: int) -> Iterator[Round]:
    return folded(world, 1, _swaps)


def _swaps(power: int) -> Iterator[Round]:
    for k in range(power.bit_length() - 1):
        yield tuple(Copy(rank, rank ^ (1 << k), 0, True) for rank in range(power))
