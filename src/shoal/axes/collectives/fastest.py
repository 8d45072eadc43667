"""Fastest: another route for each size of message, by what the network was measured to take.

Few messages win where messages are small, few bytes where they are large, and where the border lies
only the network knows. So before the first message all workers measure it together: a message, and
torch's own all-reduce, at a few sizes. Every route is then priced by its rounds, and torch's own by
its curve. The cheapest carries messages of that size, if it promises a fifth less than torch's own:
what was measured is surer than what was priced. All hold the same measurements, so all choose the
same.

Given a report of ``shoal bench routes``, nothing is measured: the route that won there at the
nearest size is taken, for the number of workers there are.

References:
    Thakur, Rabenseifner & Gropp, `Optimization of Collective Communication Operations in MPICH
    <https://doi.org/10.1177/1094342005051521>`_, 2005 (routes chosen by size).
"""

from __future__ import annotations

from functools import lru_cache, partial

from shoal.axes.collectives.blueconnect import blueconnect
from shoal.axes.collectives.butterfly import butterfly
from shoal.axes.collectives.collective import Collective, Network, Round
from shoal.axes.collectives.double_tree import double_tree
from shoal.axes.collectives.halving_doubling import halving_doubling
from shoal.axes.collectives.hierarchical import hierarchical
from shoal.axes.collectives.linear import linear
from shoal.axes.collectives.measured import Winners, winners
from shoal.axes.collectives.native import native
from shoal.axes.collectives.ring import ring
from shoal.axes.collectives.tree import tree
from shoal.axes.collectives.walk import walk
from shoal.errors import BadArgument
from shoal.notation import call

ROUTES = (
    butterfly(),
    halving_doubling(),
    ring(),
    double_tree(),
    double_tree(16),
    tree(),
    linear(),
)

MARGIN = 0.8  # of the time of torch's own


_NAMES = {
    member.__name__: member
    for member in (
        blueconnect, butterfly, double_tree, halving_doubling, hierarchical, linear, native, ring,
        tree,
    )
}  # fmt: skip


def fastest(report: str = "") -> Collective:
    """The route that costs least at each size, on the network as measured.

    Args:
        report: of ``shoal bench routes --json PATH``, whose winners are taken; without one the
            network is measured before the first message.

    Example: ``fastest``.
    """
    if not isinstance(report, str):
        raise BadArgument(f"fastest({report})", "the path of a report, in quotes")
    if not report:
        return Collective("fastest", rounds=None, chunks=_one, choose=cheapest)
    found = winners(report)
    for sizes in found.by_size.values():
        for name in sizes.values():
            call(name, _NAMES, "collective")  # refused now rather than at the first message
    return Collective(
        f"fastest({report!r})",
        rounds=None,
        chunks=_one,
        refusal=found.refusal,
        choose=partial(_won, found),
        probes=False,
    )


def _won(found: Winners, nbytes: float, world: int, network: Network) -> Collective:
    if world == 1:
        return native()
    route: Collective = call(found.at(nbytes, world), _NAMES, "collective")
    return route


def cheapest(nbytes: float, world: int, network: Network) -> Collective:
    """The cheapest route for a message of so many bytes; torch's own unless it is by a margin."""
    best, least = native(), MARGIN * network.native(nbytes)
    for route, rounds in _laid_out(world):
        seconds = walk(rounds, nbytes / route.chunks(world), network.message)
        if seconds < least:
            best, least = route, seconds
    return best


@lru_cache(maxsize=8)
def _laid_out(world: int) -> tuple[tuple[Collective, tuple[Round, ...]], ...]:
    """Every route with its rounds, which are the same for each size."""
    return tuple((route, tuple(route.rounds(world))) for route in ROUTES if route.rounds)


def _one(world: int) -> int:
    return 1
