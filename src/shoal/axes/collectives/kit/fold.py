"""Fold any number of ranks to a power of two, for routes in which ranks work in pairs.

Ranks beyond the largest power of two send their message to a rank below before the rounds, and
receive the sum after them: two more whole messages.

References:
    Thakur, Rabenseifner & Gropp, `Optimization of Collective Communication Operations in MPICH
    <https://doi.org/10.1177/1094342005051521>`_, 2005 (section 4.4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from shoal.axes.collectives.collective import Copy, Round


def power_below(world: int) -> int:
    """Return the largest power of two that is at most ``world``."""
    return 1 << (world.bit_length() - 1)


def folded(world: int, chunks: int, rounds: Callable[[int], Iterable[Round]]) -> Iterator[Round]:
    """Yield the rounds of a power of two, with one round before and after for the other ranks."""
    power = power_below(world)
    extra = [(rank, rank - power) for rank in range(power, world)]
    every = range(chunks)
    if extra:
        yield tuple(Copy(above, below, chunk, True) for above, below in extra for chunk in every)
    yield from rounds(power)
    if extra:
        yield tuple(Copy(below, above, chunk, False) for above, below in extra for chunk in every)
