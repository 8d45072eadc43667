"""Rabenseifner's all-reduce: recursive halving, then recursive doubling.

1. reduce-scatter: in each round partners swap halves of the chunks that both are responsible for,
   the farthest partner first, until each rank is responsible for one chunk, which is complete;
2. all-gather: the same rounds backwards, with sums.

``2 log2 world`` messages that carry ``2 (world - 1) / world`` of the bytes: as few bytes as a ring
in far fewer messages. It works for any number of workers: those beyond a power of two are folded
in, at the cost of two more whole messages (:mod:`shoal.axes.collectives.kit.fold`).

References:
    Rabenseifner, `Optimization of Collective Reduction Operations
    <https://doi.org/10.1007/978-3-540-24685-5_1>`_, 2004.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.axes.collectives.collective import Collective, Copy, Round
from shoal.axes.collectives.kit.fold import folded, power_below


def halving_doubling() -> Collective:
    """Reduce-scatter by halving, all-gather by doubling: few bytes in few messages."""
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
    """Return the chunks that ``rank`` is responsible for after halving at distance ``d``."""
    first = rank & -d  # d is a power of two, so this clears the bits below it
    return range(first, first + d)
