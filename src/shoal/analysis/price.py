"""Compute the seconds of a collective from its rounds and the cost of one message.

:mod:`shoal.axes.collectives.kit.walk` defines how the times of rounds are added. The model assumes
that reducing takes no time of its own, because it overlaps with receiving.

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
    """Return the seconds that these rounds take for a message of ``nbytes``.

    Args:
        rounds: copies between ranks, round by round.
        nbytes: bytes of the whole message.
        link: cost of one message between two ranks.
        chunks: number of equal chunks of the message. If None, it is the highest chunk number in
            ``rounds``, plus 1.
    """
    listed = list(rounds)
    if chunks is None:
        chunks = 1 + max((copy.chunk for copies in listed for copy in copies), default=0)
    return walk(listed, nbytes / chunks, link.cost)


def all_reduce_seconds(collective: Collective, world: int, *, nbytes: float, link: Link) -> float:
    """Return the seconds of one all-reduce over ``world`` workers.

    ``native`` has no rounds; its cost is assumed to be that of Rabenseifner's algorithm:
    ``2 ceil(log2 world)`` messages and ``2 (world - 1) / world`` of the bytes. Gloo's own ring has
    more messages, so it takes longer for small sizes. For a collective that chooses its route by
    size, the cost is that of the route for this size.
    """
    if world < 1 or nbytes < 0:
        call = f"all_reduce_seconds({collective}, world={world}, nbytes={nbytes})"
        raise BadArgument(call, "world must be at least 1 and nbytes at least 0")
    if collective.choose is not None:
        network = Network(link.cost, partial(_rabenseifner, world, link))
        collective = collective.choose(nbytes, world, network)
    if collective.rounds is None:
        return _rabenseifner(world, link, nbytes)
    return price(collective.rounds(world), nbytes, link, chunks=collective.chunks(world))


def _rabenseifner(world: int, link: Link, nbytes: float) -> float:
    """Return the seconds of recursive halving plus recursive doubling, which take equally long."""
    seconds, share = 0.0, world
    while share > 1:
        seconds += 2 * link.cost(nbytes * (share // 2) / world)
        share -= share // 2
    return seconds
