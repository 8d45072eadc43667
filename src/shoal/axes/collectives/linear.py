"""Linear all-reduce: rank 0 adds up the messages of all ranks, then sends the sum to all.

It is the simplest route, and the baseline for the others. Rank 0 receives ``world - 1`` whole
messages and sends as many, while all other ranks wait.

References:
    Ben-Nun & Hoefler, `Demystifying Parallel and Distributed Deep Learning
    <https://arxiv.org/abs/1802.09941>`_, 2019 (section 2.5, costs of reductions).
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.axes.collectives.collective import Collective, Copy, Round


def linear() -> Collective:
    """Send all messages to rank 0, which sends back the sum. The link of rank 0 is a bottleneck."""
    return Collective("linear", rounds=_rounds)


def _rounds(world: int) -> Iterator[Round]:
    for rank in range(1, world):  # one round each, so rank 0 needs a buffer for one message only
        yield (Copy(rank, 0, 0, True),)
    if world > 1:
        yield tuple(Copy(0, rank, 0, False) for rank in range(1, world))
