"""Cost of a collective: add up the same rounds that a wire runs and a proof checks.

How the times of rounds add up is defined in :mod:`shoal.axes.collectives.kit.walk`. The model
assumes that reducing overlaps with receiving.

References:
    Thakur, Rabenseifner & Gropp, `Optimization of Collective Communication Operations in MPICH
    <https://doi.org/10.1177/1094342005051521>`_, 2005.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from shoal.analysis.links import Link
from shoal.axes.collectives import Collective, Network, Round, walk
from shoal.errors import BadArgument


def price(
    rounds: Iterable[Round], nbytes: float, link: Link, *, chunks: int | None = None
) -> float:
    """Return the seconds that a message of ``nbytes`` takes in these rounds.

    Args:
        rounds: copies between ranks, round by round.
        nbytes: of the whole message.
        link: cost of one message between two ranks.
        chunks: number of equal chunks of the message; None: one more than the highest in rounds.
    """
    listed = list(rounds)
    if chunks is None:
        chunks = 1 + max((copy.chunk for copies in listed for copy in copies), default=0)
    return walk(listed, nbytes / chunks, link.cost)


def all_reduce_seconds(collective: Collective, world: int, *, nbytes: float, link: Link) -> float:
    """Return the seconds of one all-reduce over ``world`` workers.

    ``native`` has no rounds; it costs what Rabenseifner's algorithm does: ``2 ceil(log2 world)``
    messages and ``2 (world - 1) / world`` of the bytes, the least for so few messages. Gloo's own
    ring has more latency: measure where it matters. A route that chooses by size costs what its
    choice for this size does.
    """
    if world < 1 or nbytes < 0:
        raise BadArgument(f"price of {collective} (world={world}, nbytes={nbytes})", "too small")
    if collective.choose is not None:
        network = Network(link.cost, partial(_rabenseifner, world, link))
        collective = collective.choose(nbytes, world, network)
    if collective.rounds is None:
        return _rabenseifner(world, link, nbytes)
    return price(collective.rounds(world), nbytes, link, chunks=collective.chunks(world))


def _rabenseifner(world: int, link: Link, nbytes: float) -> float:
    """Return the seconds of halving and then doubling: twice the same messages."""
    seconds, share = 0.0, world
    while share > 1:
        seconds += 2 * link.cost(nbytes * (share // 2) / world)
        share -= share // 2
    return seconds
