"""Price of a collective: walk the same rounds that a wire runs and a proof checks.

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
    return walk(listed, nbytes / chunks, link.cost)


def all_reduce_seconds(collective: Collective, world: int, *, nbytes: float, link: Link) -> float:
    """Seconds of one all-reduce over ``world`` workers.

    ``native`` gives no rounds: it is taken to do what Rabenseifner's algorithm does, that is
    ``2 ceil(log2 world)`` messages and ``2 (world - 1) / world`` of the bytes, which no all-reduce
    in so few messages can undercut. Gloo's own ring has more latency: measure where it matters.
    A route that differs with size costs what its choice for this size does.
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
    """Halve the ranks' share until one is left, then double it back: twice the same messages."""
    seconds, share = 0.0, world
    while share > 1:
        seconds += 2 * link.cost(nbytes * (share // 2) / world)
        share -= share // 2
    return seconds
