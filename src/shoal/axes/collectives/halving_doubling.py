"""Rabenseifner's all-reduce: recursive halving, then recursive doubling.

1. reduce-scatter: partners are responsible for the same chunks. In each round, a rank sends one
   half of these chunks to its partner and stays responsible for the other half. The partner is
   ``world / 2`` ranks away in the first round, and half as far in each next one. At the end each
   rank is responsible for one chunk, and has its sum.
2. all-gather: the same rounds in reverse order, in which ranks send sums.

Each rank sends ``2 (world - 1) / world`` of the bytes, as in a ring, but in ``2 log2 world``
messages, far fewer than in a ring. If the number of workers is not a power of two, two more
messages are needed (:mod:`shoal.axes.collectives.kit.fold`).

References:
    Rabenseifner, `Optimization of Collective Reduction Operations
    <https://doi.org/10.1007/978-3-540-24685-5_1>`_, 2004.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.axes.collectives.collective import Collective, Copy, Round
from shoal.axes.collectives.kit.fold import folded, power_below


def halving_doubling() -> Collective:
    """Reduce-scatter by halving, all-gather by doubling. This sends few bytes in few messages."""
    return Collective("halving_doubling", rounds=_rounds, chunks=power_below)


def _rounds(world: int) -> Iterator[Round]:
    return folded(world, power_below(world), _halve_then_double)


def _halve_then_double(power: int) -> Iterator[Round]:
    distances = [power >> k for k in range(1, power.bit_length())]
    for d in distances:
        yield tuple(
            Copy(rank, rank ^ d, chunk, True)
            for rank in range(power)
            for chunk in _own_chunks(rank ^ d, d)
        )
    for d in reversed(distances):
        yield tuple(
            Copy(rank, rank ^ d, chunk, False)
            for rank in range(power)
            for chunk in _own_chunks(rank, d)
        )


def _own_chunks(rank: int, d: int) -> range:
    """Return the chunks that ``rank`` is responsible for after the round with distance ``d``."""
    first = rank & -d  # d is a power of two, so this clears the bits below it
    return range(first, first + d)
