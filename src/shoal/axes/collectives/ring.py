"""Ring all-reduce: in each round every worker sends one chunk to the next rank.

The message is divided into as many chunks as there are workers. There are two phases of
``world - 1`` rounds:

1. reduce-scatter: partial sums are passed on, until each worker has the sum of one chunk;
2. all-gather: the sums are passed on, until each worker has all of them.

Each worker sends ``2 (world - 1) / world`` of the message, the fewest bytes possible, in
``2 (world - 1)`` messages. So a ring is best for large messages. Each chunk is summed in one order
and then copied, so all workers have the same bits.

References:
    Patarasuk & Yuan, `Bandwidth optimal all-reduce algorithms for clusters of workstations
    <https://doi.org/10.1016/j.jpdc.2008.09.002>`_, 2009.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.axes.collectives.collective import Collective, Copy, Round


def ring() -> Collective:
    """Send partial sums around a ring, then the sums. This sends few bytes in many messages."""
    return Collective("ring", rounds=_rounds, chunks=_chunks)


def _chunks(world: int) -> int:
    return world


def _rounds(world: int) -> Iterator[Round]:
    for t in range(world - 1):
        yield tuple(_to_the_right(r, r - t, world, add=True) for r in range(world))
    for t in range(world - 1):
        yield tuple(_to_the_right(r, r + 1 - t, world, add=False) for r in range(world))


def _to_the_right(rank: int, chunk: int, world: int, *, add: bool) -> Copy:
    return Copy(rank, (rank + 1) % world, chunk % world, add)
