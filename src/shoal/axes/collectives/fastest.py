"""Fastest: another route for each size of message, the one that took least when all were tried.

Few messages win where messages are small, few bytes where they are large, and where the border lies
only the machines know: ranks that share a core, or a switch, upset every formula. So before the
first message of a size (to the nearest power of four) workers run the routes in turns, on zeros,
and drop what falls behind. The slowest rank counts and times are agreed, so all choose the same.
Torch's own is kept unless another is clearly faster.

What would take far longer by its bytes alone is not even tried: for that the network is measured
first, a message and torch's own all-reduce at a few sizes. From these every route is priced, too,
where nothing can run: a plan for machines that are not there takes the cheapest.

Given a report of ``shoal bench routes``, nothing is measured: the route that won there at the
nearest size is taken, for the number of workers there are.

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
from shoal.axes.collectives.kit.choose import Winners, cheapest, promising, winners
from shoal.axes.collectives.linear import linear
from shoal.axes.collectives.native import native
from shoal.axes.collectives.ring import ring
from shoal.axes.collectives.tree import tree
from shoal.errors import BadArgument
from shoal.notation import call

_NAMES = {
    member.__name__: member
    for member in (
        blueconnect, butterfly, double_tree, halving_doubling, hierarchical, linear, native, ring,
        tree,
    )
}  # fmt: skip


def fastest(report: str = "") -> Collective:
    """The route that takes least at each size, on the machines at hand.

    Args:
        report: of ``shoal bench routes --json PATH``, whose winners are taken; without one routes
            are timed before the first message of a size.

    Example: ``fastest``.
    """
    if not isinstance(report, str):
        raise BadArgument(f"fastest({report})", "the path of a report, in quotes")
    if not report:
        return Collective(
            "fastest", rounds=None, chunks=_one, choose=cheapest, contenders=promising
        )
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


def _one(world: int) -> int:
    return 1
