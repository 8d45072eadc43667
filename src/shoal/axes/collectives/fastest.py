"""Fastest: for each size of message the route that was fastest when all were timed.

Small messages want few messages, large ones few bytes. The border depends on the machines: ranks
that share a core, or a switch, contradict every formula. So before the first message of a size (to
the nearest power of four) the workers run the routes in turns, on zeros, and drop those that fall
behind. They agree on the times of the slowest rank, so all choose the same. Torch's own stays
unless another is clearly faster.

A route that would take far longer by its bytes alone is not timed. To know that, the workers first
measure the network: a message and torch's own all-reduce at a few sizes. Where nothing can run, as
in a plan for other machines, the same measurements price every route, and the cheapest is chosen.

With a report of ``shoal bench routes`` nothing is measured: the winner at the nearest size is
chosen, for the present number of workers.

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
    """Use the fastest route for each size of message, on the machines at hand.

    Args:
        report: path of a report of ``shoal bench routes --json PATH``, whose winners are chosen;
            without one, routes are timed before the first message of a size.

    Example: ``fastest``.
    """
    if not isinstance(report, str):
        raise BadArgument(f"fastest({report})", "the path of a report, in quotes")
    if not report:
        return Collective("fastest", rounds=None, choose=cheapest, contenders=promising)
    measured = winners(report)
    for sizes in measured.by_size.values():
        for name in sizes.values():
            call(name, _NAMES, "collective")  # raises now rather than at the first message

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
    route: Collective = call(measured.at(nbytes, world), _NAMES, "collective")
    return route
