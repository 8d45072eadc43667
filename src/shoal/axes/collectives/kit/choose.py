"""Choose a route: by its computed seconds, or from a report of ``shoal bench routes``."""

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

MARGIN = 0.8  # a route must take less than this share of the seconds of torch's own all-reduce
HOPELESS = 3.0  # a route is not timed if its bytes alone take over 3 times as long as torch's own
WINNER = "which route wins"
_CASE = re.compile(rf"(\d+)({'|'.join(UNITS)})?, (\d+) ranks(?:: (.+?)(?: or .*)?)?")


def cheapest(nbytes: float, world: int, network: Network) -> Collective:
    """Return the route with the least computed seconds, or torch's own (see ``MARGIN``)."""
    best, least = native(), MARGIN * network.native(nbytes)
    for route, rounds in _rounds(world):
        seconds = walk(rounds, nbytes / route.chunks(world), network.message)
        if seconds < least:
            best, least = route, seconds
    return best


def promising(nbytes: float, world: int, network: Network) -> tuple[Collective, ...]:
    """Return torch's own all-reduce and all routes that are worth timing (see ``HOPELESS``)."""
    bound, startup = HOPELESS * network.native(nbytes), network.message(0)

    def bytes_alone(size: float) -> float:
        return network.message(size) - startup

    worth_timing = (
        route
        for route, rounds in _rounds(world)
        if walk(rounds, nbytes / route.chunks(world), bytes_alone) <= bound
    )
    return native(), *worth_timing


@lru_cache(maxsize=8)
def _rounds(world: int) -> tuple[tuple[Collective, tuple[Round, ...]], ...]:
    """Return each route with its rounds, which do not depend on the message size."""
    return tuple((route, tuple(route.rounds(world))) for route in ROUTES if route.rounds)


@dataclass(frozen=True)
class Winners:
    """The fastest route for each number of ranks and message size, read from a report.

    Attributes:
        path: path of the report.
        by_size: number of ranks -> bytes of the message -> the route as a user types it.
    """

    path: str
    by_size: Mapping[int, Mapping[int, str]]

    def at(self, nbytes: float, ranks: int) -> str:
        """Return the fastest route at the measured size whose ratio to ``nbytes`` is nearest to 1.

        Raises:
            BadArgument: the report has no route for this number of ranks.
        """
        if why := self.refusal(ranks):
            raise BadArgument(f"fastest({self.path!r})", why)
        route_by_nbytes = self.by_size[ranks]
        distance = {size: abs(math.log(size / max(nbytes, 1))) for size in route_by_nbytes}
        return route_by_nbytes[min(distance, key=distance.__getitem__)]

    def refusal(self, ranks: int) -> str:
        """Return why the report has no route for these ranks, or "" if it has one or ranks is 1."""
        if ranks == 1 or ranks in self.by_size:
            return ""
        known = ", ".join(map(str, sorted(self.by_size)))
        why = f"{self.path} was measured with {known} ranks, not with {ranks}"
        return f"{why}; fastest without a report measures itself"


def read_winners(path: str) -> Winners:
    """Read a report of ``shoal bench routes``, and return its fastest routes.

    Raises:
        BadArgument: the file cannot be read, or is not a report that names a fastest route.
    """
    call, hint = f"fastest({path!r})", "write one with shoal bench routes --json PATH"
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
        raise BadArgument(call, f"the file cannot be read ({error.strerror}); {hint}") from None
    except (ValueError, KeyError, TypeError):
        raise BadArgument(call, f"this is not a report of shoal bench routes; {hint}") from None
    if not by_size:
        raise BadArgument(call, f"the report names no fastest route; {hint}")
    return Winners(path, by_size)


def read_case(case: str) -> tuple[int, int, str]:
    """Return bytes, number of ranks and first route in the text of a ``shoal bench routes`` case.

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
