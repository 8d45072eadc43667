"""Fold a world down to a power of two, for routes in which ranks meet in pairs.

Ranks beyond the largest power of two hand their part to one below before the rounds, and are handed
the sum after them: two more messages of the whole, and any number of workers will do.

References:
    Thakur, Rabenseifner & Gropp, `Optimization of Collective Communication Operations in MPICH
    <https://doi.org/10.1177/1094342005051521>`_, 2005 (section 4.4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from shoal.axes.collectives.collective import Copy, Round


def power_below(world: int) -> int:
    """The largest power of two that is not above ``world``."""
    return 1 << (world.bit_length() - 1)


def folded(world: int, chunks: int, rounds: Callable[[int], Iterable[Round]]) -> Iterator[Round]:
    """``rounds`` of a power of two, and a round before and after them for those left over."""
    power = power_below(world)
    extra = [(rank, rank - power) for rank in range(power, world)]
    every = range(chunks)
    if extra:
        yield tuple(Copy(above, below, chunk, True) for above, below in extra for chunk in every)
    yield from rounds(power)
    if extra:
        yield tuple(Copy(below, above, chunk, False) for above, below in extra for chunk in every)
