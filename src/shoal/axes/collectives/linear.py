"""Linear all-reduce: rank 0 adds up one message after the other, then sends the sum to all.

It is the simplest route, and the baseline for the others: the link of rank 0 carries every message,
``world - 1`` whole ones in and as many out, while all other ranks wait.

References:
    Ben-Nun & Hoefler, `Demystifying Parallel and Distributed Deep Learning
    <https://arxiv.org/abs/1802.09941>`_, 2019 (section 2.5, costs of reductions).
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.axes.collectives.collective import Collective, Copy, Round


def linear() -> Collective:
    """Send everything to rank 0, which sends back the sum: simple, but limited by its link."""
    return Collective("linear", rounds=_rounds)


def _rounds(world: int) -> Iterator[Round]:
    for rank in range(1, world):  # one at a time, so that rank 0 never holds more than one message
        yield (Copy(rank, 0, 0, True),)
    if world > 1:
        yield tuple(Copy(0, rank, 0, False) for rank in range(1, world))
