"""Rabenseifner's all-reduce: halve what one is in charge of, then double it back.

1. reduce-scatter: in each round two swap halves of what both are in charge of, the farthest first,
   until each is in charge of one chunk, which is complete;
2. all-gather: the same rounds backwards, with sums.

``2 log2 world`` messages that carry ``2 (world - 1) / world`` of the bytes: as few bytes as a ring
in far fewer messages. Any number of workers will do: those beyond a power of two are folded in, at
the price of two more messages of the whole (:mod:`shoal.axes.collectives.kit.fold`).

References:
    Rabenseifner, `Optimization of Collective Reduction Operations
    <https://doi.org/10.1007/978-3-540-24685-5_1>`_, 2004.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.axes.collectives.collective import Collective, Copy, Round
from shoal.axes.collectives.kit.fold import folded, power_below


def halving_doubling() -> Collective:
    """Pairs swap halves of halves, then sums the same way back: few bytes in few messages."""
    return Collective("halving_doubling", rounds=_rounds, chunks=power_below)


def _rounds(world: int) -> Iterator[Round]:
    return folded(world, power_below(world), _halve_then_double)


def _halve_then_double(power: int) -> Iterator[Round]:
    distances = [power >> k for k in range(1, power.bit_length())]
    for d in distances:
        yield tuple(
            Copy(rank, rank ^ d, chunk, True)
            for rank in range(power)
            for chunk in _charge(rank ^ d, d)
        )
    for d in reversed(distances):
        yield tuple(
            Copy(rank, rank ^ d, chunk, False)
            for rank in range(power)
            for chunk in _charge(rank, d)
        )


def _charge(rank: int, d: int) -> range:
    """The chunks that ``rank`` is in charge of once it has halved at distance ``d``."""
    first = rank & -d  # d is a power of two, so this clears the bits below it
    return range(first, first + d)
