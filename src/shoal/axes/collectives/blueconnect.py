"""BlueConnect: an all-reduce that is decomposed over several levels of a network.

First a reduce-scatter runs inside each innermost group. Then ranks with the same slice, one of each
group, form the groups of the next level and reduce-scatter that slice, and so on outwards. The
all-gathers follow in reverse order. Each level sends only a slice of the message of the level
inside it, so the slower outer links carry fewer bytes. For example, ``blueconnect(2, 4)`` on 16
workers makes pairs, then groups of four pairs, and last a ring across the two groups.

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
        levels: group sizes from the innermost level outwards. The number of workers must be a
            multiple of their product. A ring is used across the groups of the outermost level.

    Example: ``blueconnect(2, 2)``.
    """
    name = f"blueconnect({', '.join(map(str, levels))})"
    if not levels:
        raise BadArgument(name, "a group size is missing; write for example blueconnect(2, 2)")
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
        return f"its levels multiply to {product}, and {world} workers are not a multiple of it"
    return ""
