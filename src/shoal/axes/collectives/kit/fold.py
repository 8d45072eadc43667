"""Make a route for a power of two of ranks work for any number of ranks.

Let p be the largest power of two that is at most the number of ranks. Before the rounds, each rank
r >= p sends its whole message to rank r - p, which adds it. After the rounds, rank r - p sends the
sum back.

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
    """Yield ``rounds(p)``, and for the ranks from p on one round before these and one after."""
    power = power_below(world)
    extra = [(rank, rank - power) for rank in range(power, world)]
    all_chunks = range(chunks)
    if extra:
        yield tuple(Copy(rank, low, chunk, True) for rank, low in extra for chunk in all_chunks)
    yield from rounds(power)
    if extra:
        yield tuple(Copy(low, rank, chunk, False) for rank, low in extra for chunk in all_chunks)
