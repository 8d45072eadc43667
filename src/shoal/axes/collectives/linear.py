"""Linear all-reduce: the first worker adds up one message after the other, then tells everybody.

It is what one writes first, and the yardstick for the rest: the first worker's link carries every
message, ``world - 1`` whole ones in and as many out, while all others wait.

References:
    Ben-Nun & Hoefler, `Demystifying Parallel and Distributed Deep Learning
    <https://arxiv.org/abs/1802.09941>`_, 2019 (section 2.5, costs of reductions).
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.axes.collectives.collective import Collective, Copy, Round


def linear() -> Collective:
    """One worker adds up what each sends and sends it back: simple, and its link is the limit."""
    return Collective("linear", rounds=_rounds, chunks=_one)


def _one(world: int) -> int:
    return 1


def _rounds(world: int) -> Iterator[Round]:
    for rank in range(1, world):  # a round each, so that the first never holds more than one
        yield (Copy(rank, 0, 0, True),)
    if world > 1:
        yield tuple(Copy(0, rank, 0, False) for rank in range(1, world))
