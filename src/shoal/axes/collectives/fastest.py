"""Fastest: choose the fastest route for each message size, by timing.

A small message is fastest on a route with few rounds, a large one on a route that sends few bytes.
The size at which this changes depends on the machines, and formulas predict it badly when ranks
share a core or a switch. So before the first message of a size (rounded to a power of four) the
workers run the candidate routes in turns, on zeros, and drop those that are much slower than the
fastest. All ranks use the times of the slowest rank, so all choose the same route. Torch's own
all-reduce is used unless a route is clearly faster.

A route that would take far longer by its bytes alone is not timed. To compute this, the workers
first time a message and torch's own all-reduce at a few sizes. If no route can be timed, for
example in a cost model, the seconds of each route are computed from the times of a message, and the
route with the least seconds is chosen.

With a report of ``shoal bench routes`` nothing is timed. The fastest route in the report is used
for this number of workers and the nearest size.

References:
    Thakur, Rabenseifner & Gropp, `Optimization of Collective Communication Operations in MPICH
    <https://doi.org/10.1177/1094342005051521>`_, 2005 (routes chosen by size).
"""

from __future__ import annotations

from functools import partial

from shoal.axes.collectives.blueconnect import blueconnect
from shoal.axes.collectives.butterfly import butterfly
from shoal.axes.collectives.collective import Collective, Network
from shoal.axes.collectives.double_tree import double_tree
from shoal.axes.collectives.halving_doubling import halving_doubling
from shoal.axes.collectives.hierarchical import hierarchical
from shoal.axes.collectives.kit.choose import Winners, cheapest, promising, read_winners
from shoal.axes.collectives.linear import linear
from shoal.axes.collectives.native import native
from shoal.axes.collectives.ring import ring
from shoal.axes.collectives.tree import tree
from shoal.errors import BadArgument
from shoal.notation import call

_COLLECTIVES = {
    member.__name__: member
    for member in (
        blueconnect, butterfly, double_tree, halving_doubling, hierarchical, linear, native, ring,
        tree,
    )
}  # fmt: skip


def fastest(report: str = "") -> Collective:
    """Use the fastest route for each message size, as measured on these machines.

    Args:
        report: path of a file that ``shoal bench routes --json PATH`` wrote; its fastest routes are
            used. Without it, routes are timed before the first message of each size.

    Example: ``fastest``.
    """
    if not isinstance(report, str):
        raise BadArgument(f"fastest({report})", "report must be the path of a file, in quotes")
    if not report:
        return Collective("fastest", rounds=None, choose=cheapest, contenders=promising)
    measured = read_winners(report)
    for route_by_nbytes in measured.by_size.values():
        for route in route_by_nbytes.values():
            call(route, _COLLECTIVES, "collective")  # raises now, not at the first message

    return Collective(
        f"fastest({report!r})",
        rounds=None,
        refusal=measured.refusal,
        choose=partial(_winner, measured),
        probes=False,
    )


def _winner(measured: Winners, nbytes: float, world: int, network: Network) -> Collective:
    if world == 1:
        return native()
    route: Collective = call(measured.at(nbytes, world), _COLLECTIVES, "collective")
    return route
