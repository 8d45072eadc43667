"""BlueConnect: an all-reduce decomposed over several levels of a network.

Reduce-scatter inside the innermost groups, then among the ranks with the same slice in the groups
of the next level, and so on outwards; all-gather on the way back. Each level carries only one slice
per group of the level inside it, so slower links carry less. ``blueconnect(2, 4)`` on 16 workers:
pairs, groups of four pairs, and a ring across the two groups.

References:
    Cho, Finkler, Kung & Hunter, `BlueConnect: Decomposing All-Reduce for Deep Learning on
    Heterogeneous Network Hierarchy <https://doi.org/10.1147/JRD.2019.2947013>`_, 2019.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from shoal.axes.collectives.collective import Collective, Round
from shoal.axes.collectives.hierarchical import nested
from shoal.axes.collectives.ring import ring
from shoal.errors import BadArgument


def blueconnect(*levels: int) -> Collective:
    """Reduce-scatter level by level outwards, all-gather level by level inwards.

    Args:
        levels: group sizes from the innermost level outwards; the number of workers must be a
            multiple of their product, and a last level joins the remaining groups.

    Example: ``blueconnect(2, 2)``.
    """
    name = f"blueconnect({', '.join(map(str, levels))})"
    if not levels:
        raise BadArgument(name, "missing the size of at least one level: blueconnect(2, 2)")
    route = ring()
    for level in reversed(levels):
        route = nested(name, level, route)
    product = math.prod(levels)
    refusal = partial(_refusal, product)
    return replace(route, rounds=partial(_rounds, product, route), refusal=refusal)


def _rounds(product: int, route: Collective, world: int) -> Iterator[Round]:
    if why := _refusal(product, world):
        raise BadArgument(f"{route}", why)
    if route.rounds is not None:
        yield from route.rounds(world)


def _refusal(product: int, world: int) -> str:
    if world > 1 and world % product:
        return f"its levels make groups of {product}, and {world} workers are no multiple of that"
    return ""
