"""Choose a route: by its price on a network, or from a report of ``shoal bench routes``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from shoal.axes.collectives.butterfly import butterfly
from shoal.axes.collectives.collective import Collective, Network, Round
from shoal.axes.collectives.double_tree import double_tree
from shoal.axes.collectives.halving_doubling import halving_doubling
from shoal.axes.collectives.kit.walk import walk
from shoal.axes.collectives.linear import linear
from shoal.axes.collectives.native import native
from shoal.axes.collectives.ring import ring
from shoal.axes.collectives.tree import tree
from shoal.errors import BadArgument
from shoal.notation import UNITS

ROUTES = (butterfly(), halving_doubling(), ring(), double_tree(), double_tree(16), tree(), linear())

MARGIN = 0.8  # of the seconds of torch's own, which were measured; a price is less certain
HOPELESS = 3.0  # times the seconds of torch's own, for the bytes alone
WINNER = "which route wins"
_CASE = re.compile(rf"(\d+)({'|'.join(UNITS)})?, (\d+) ranks(?:: (.+?)(?: or .*)?)?")


def cheapest(nbytes: float, world: int, network: Network) -> Collective:
    """Return the cheapest route of a message; torch's own unless another is so by a margin."""
    best, least = native(), MARGIN * network.native(nbytes)
    for route, rounds in _rounds(world):
        seconds = walk(rounds, nbytes / route.chunks(world), network.message)
        if seconds < least:
            best, least = route, seconds
    return best


def promising(nbytes: float, world: int, network: Network) -> tuple[Collective, ...]:
    """Return torch's own and each route that its bytes alone do not make hopelessly slow."""
    bound, startup = HOPELESS * network.native(nbytes), network.message(0)

    def bytes_alone(size: float) -> float:
        return network.message(size) - startup

    hopeful = (
        route
        for route, rounds in _rounds(world)
        if walk(rounds, nbytes / route.chunks(world), bytes_alone) <= bound
    )
    return native(), *hopeful


@lru_cache(maxsize=8)
def _rounds(world: int) -> tuple[tuple[Collective, tuple[Round, ...]], ...]:
    """Return each route with its rounds, which are the same for all sizes."""
    return tuple((route, tuple(route.rounds(world))) for route in ROUTES if route.rounds)


@dataclass(frozen=True)
class Winners:
    """The fastest route at each number of ranks and size.

    Attributes:
        path: of the report.
        by_size: number of ranks -> bytes of the message -> the route as one types it.
    """

    path: str
    by_size: Mapping[int, Mapping[int, str]]

    def at(self, nbytes: float, ranks: int) -> str:
        """Return the winner at the measured size that is nearest by ratio.

        Raises:
            BadArgument: this number of ranks was not measured.
        """
        if why := self.refusal(ranks):
            raise BadArgument(f"fastest({self.path!r})", why)
        sizes = self.by_size[ranks]
        return sizes[min(sizes, key=lambda size: abs(math.log(size / max(nbytes, 1))))]

    def refusal(self, ranks: int) -> str:
        """Say why there is no winner for so many ranks; empty if there is one."""
        if ranks == 1 or ranks in self.by_size:
            return ""
        known = ", ".join(map(str, sorted(self.by_size)))
        why = f"{self.path} has measured {known} ranks, not {ranks}"
        return f"{why}; plain fastest measures by itself"


def winners(path: str) -> Winners:
    """Read a report of ``shoal bench routes``.

    Raises:
        BadArgument: the file does not exist, or is no such report.
    """
    call, hint = f"fastest({path!r})", "make one: shoal bench routes --json PATH"
    by_size: dict[int, dict[int, str]] = {}
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))["results"]
        if not isinstance(results, list):
            raise TypeError("results")
        for row in results:
            if row["metric"] == WINNER:
                nbytes, ranks, route = read_case(row["case"])
                if not route:
                    raise ValueError(row["case"])
                by_size.setdefault(ranks, {})[nbytes] = route
    except OSError as error:
        raise BadArgument(call, f"cannot be read ({error.strerror}); {hint}") from None
    except (ValueError, KeyError, TypeError):
        raise BadArgument(call, f"is not a report of shoal bench routes; {hint}") from None
    if not by_size:
        raise BadArgument(call, f"names no winner; {hint}")
    return Winners(path, by_size)


def read_case(case: str) -> tuple[int, int, str]:
    """Return the bytes, the ranks and the first route of a case of ``shoal bench routes``.

    >>> read_case("4KB, 2 ranks: ring or tree"), read_case("16MB, 4 ranks")
    ((4096, 2, 'ring'), (16777216, 4, ''))

    Raises:
        ValueError: the text is no such case.
    """
    match = _CASE.fullmatch(case)
    if match is None:
        raise ValueError(case)
    number, unit, ranks, route = match.groups()
    return int(number) * UNITS.get(unit, 1), int(ranks), route or ""
