"""Routes by what their messages would take on a network: the cheapest, and those worth a trial."""

from __future__ import annotations

from functools import lru_cache

from shoal.axes.collectives.butterfly import butterfly
from shoal.axes.collectives.collective import Collective, Network, Round
from shoal.axes.collectives.double_tree import double_tree
from shoal.axes.collectives.halving_doubling import halving_doubling
from shoal.axes.collectives.linear import linear
from shoal.axes.collectives.native import native
from shoal.axes.collectives.ring import ring
from shoal.axes.collectives.tree import tree
from shoal.axes.collectives.walk import walk

ROUTES = (
    butterfly(),
    halving_doubling(),
    ring(),
    double_tree(),
    double_tree(16),
    tree(),
    linear(),
)

MARGIN = 0.8  # of the time of torch's own: what was measured is surer than what was priced
HOPELESS = 3.0  # times as long as torch's own, by bytes alone


def cheapest(nbytes: float, world: int, network: Network) -> Collective:
    """The cheapest route for a message of so many bytes; torch's own unless it is by a margin."""
    best, least = native(), MARGIN * network.native(nbytes)
    for route, rounds in _laid_out(world):
        seconds = walk(rounds, nbytes / route.chunks(world), network.message)
        if seconds < least:
            best, least = route, seconds
    return best


def promising(nbytes: float, world: int, network: Network) -> tuple[Collective, ...]:
    """Torch's own, and each route whose bytes alone do not rule it out."""
    bound, nothing = HOPELESS * network.native(nbytes), network.message(0)

    def bytes_alone(size: float) -> float:
        return network.message(size) - nothing

    hopeful = (
        route
        for route, rounds in _laid_out(world)
        if walk(rounds, nbytes / route.chunks(world), bytes_alone) <= bound
    )
    return native(), *hopeful


@lru_cache(maxsize=8)
def _laid_out(world: int) -> tuple[tuple[Collective, tuple[Round, ...]], ...]:
    """Every route with its rounds, which are the same for each size."""
    return tuple((route, tuple(route.rounds(world))) for route in ROUTES if route.rounds)
