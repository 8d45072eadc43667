"""Compute the seconds of a route: add up the seconds of its rounds.

Rounds run one after the other. In a round, each rank sends and receives at the same time (full
duplex). It sends its messages one after the other, and receives its messages one after the other.
All chunks from one rank to another are one message. A round takes as long as its busiest rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shoal.axes.collectives.collective import Cost, Round


def walk(rounds: Iterable[Round], chunk_nbytes: float, cost: Cost) -> float:
    """Return the seconds that these rounds take.

    Args:
        rounds: the rounds of the route.
        chunk_nbytes: bytes of one chunk.
        cost: nbytes -> seconds of a message between two ranks.
    """
    return sum((_round_seconds(copies, chunk_nbytes, cost) for copies in rounds), 0.0)


def _round_seconds(copies: Round, chunk_nbytes: float, cost: Cost) -> float:
    messages = Counter((copy.source, copy.target) for copy in copies)
    busy: dict[tuple[str, int], float] = {}
    for (source, target), count in messages.items():
        seconds = cost(count * chunk_nbytes)
        for end in (("sends", source), ("receives", target)):
            busy[end] = busy.get(end, 0.0) + seconds
    return max(busy.values(), default=0.0)
