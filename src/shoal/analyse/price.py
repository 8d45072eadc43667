"""Price of a collective: walk the same rounds that a wire runs and a proof checks.

Rounds follow one another. In a round each rank sends and receives at once (full duplex), but its
own messages one after the other; all chunks from one rank to another are one message. A round lasts
as long as its busiest rank. Reducing is taken to hide behind receiving.

References:
    Thakur, Rabenseifner & Gropp, `Optimization of Collective Communication Operations in MPICH
    <https://doi.org/10.1177/1094342005051521>`_, 2005.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shoal.analyse.links import Link
from shoal.axes.collectives import Collective, Round
from shoal.errors import BadArgument


def price(
    rounds: Iterable[Round], nbytes: float, link: Link, *, chunks: int | None = None
) -> float:
    """Seconds that a message of ``nbytes`` takes to go through these rounds.

    Args:
        rounds: who copies what to whom.
        nbytes: of the whole message.
        link: what one message between two ranks costs.
        chunks: into how many equal chunks the message is cut; None: one more than the highest.
    """
    listed = list(rounds)
    if chunks is None:
        chunks = 1 + max((copy.chunk for copies in listed for copy in copies), default=0)
    return sum(_round_seconds(copies, nbytes / chunks, link) for copies in listed)


def all_reduce_seconds(collective: Collective, world: int, *, nbytes: float, link: Link) -> float:
    """Seconds of one all-reduce over ``world`` workers.

    ``native`` gives no rounds: it is taken to do what Rabenseifner's algorithm does, that is
    ``2 ceil(log2 world)`` messages and ``2 (world - 1) / world`` of the bytes, which no all-reduce
    in so few messages can undercut. Gloo's own ring has more latency: measure where it matters.
    """
    if world < 1 or nbytes < 0:
        raise BadArgument(f"price of {collective} (world={world}, nbytes={nbytes})", "too small")
    if collective.rounds is None:
        return _rabenseifner(world, nbytes, link)
    return price(collective.rounds(world), nbytes, link, chunks=collective.chunks(world))


def _round_seconds(copies: Round, chunk_nbytes: float, link: Link) -> float:
    messages = Counter((copy.source, copy.target) for copy in copies)
    busy: dict[tuple[str, int], float] = {}
    for (source, target), count in messages.items():
        seconds = link.cost(count * chunk_nbytes)
        for end in (("sends", source), ("receives", target)):
            busy[end] = busy.get(end, 0.0) + seconds
    return max(busy.values(), default=0.0)


def _rabenseifner(world: int, nbytes: float, link: Link) -> float:
    """Halve the ranks' share until one is left, then double it back: twice the same messages."""
    seconds, share = 0.0, world
    while share > 1:
        seconds += 2 * link.cost(nbytes * (share // 2) / world)
        share -= share // 2
    return seconds
