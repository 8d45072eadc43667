"""Butterfly all-reduce (recursive doubling): in every round all swap sums with one farther away.

After round ``k`` each holds the sum over its group of ``2^(k + 1)``, so ``log2 world`` rounds do,
each of the whole message: the fewest messages there can be, hence best for small ones. What two
swap they add up as ``a + b`` and ``b + a``, which are the same bits.

Any number of workers will do: those beyond a power of two are folded in, at the price of two more
messages (:mod:`shoal.axes.collectives.kit.fold`).

References:
    Thakur, Rabenseifner & Gropp, `Optimization of Collective Communication Operations in MPICH
    <https://doi.org/10.1177/1094342005051521>`_, 2005 (recursive doubling).
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.axes.collectives.collective import Collective, Copy, Round
from shoal.axes.collectives.kit.fold import folded


def butterfly() -> Collective:
    """All swap whole sums with one twice as far each round: fewest messages, many bytes."""
    return Collective("butterfly", rounds=_rounds, chunks=_one)


def _one(world: int) -> int:
    return 1


def _rounds(world: int) -> Iterator[Round]:
    return folded(world, 1, _swaps)


def _swaps(power: int) -> Iterator[Round]:
    for k in range(power.bit_length() - 1):
        yield tuple(Copy(rank, rank ^ (1 << k), 0, True) for rank in range(power))
