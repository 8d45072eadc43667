"""Ring all-reduce: every link is busy in every round, so that the fewest bytes are sent.

The message is cut into as many chunks as there are workers. Two phases of ``world - 1`` rounds:

1. reduce-scatter: each worker passes a partial sum to the right and ends with one complete chunk;
2. all-gather: the complete chunks travel once around the ring.

Each worker sends ``2 (world - 1) / world`` of the message, in ``2 (world - 1)`` messages: best for
large ones. Each chunk is summed along one path and then copied, so all workers hold the same bits.

References:
    Patarasuk & Yuan, `Bandwidth optimal all-reduce algorithms for clusters of workstations
    <https://doi.org/10.1016/j.jpdc.2008.09.002>`_, 2009.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.axes.collectives.collective import Collective, Copy, Round


def ring() -> Collective:
    """Pass partial sums around a ring, then the sums: fewest bytes, many messages."""
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
