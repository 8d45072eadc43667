"""Routes by what their messages would take on a network: the cheapest, and those worth a trial.

Which route won where, as ``shoal bench routes --json PATH`` measured it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
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


WINNER = "which route wins"
_CASE = re.compile(rf"(\d+)({'|'.join(UNITS)})?, (\d+) ranks(?:: (.+?)(?: or .*)?)?")


@dataclass(frozen=True)
class Winners:
    """The route of the least time at each number of ranks and size.

    Attributes:
        path: of the report.
        by_size: number of ranks -> bytes of the message -> what one types for the route.
    """

    path: str
    by_size: Mapping[int, Mapping[int, str]]

    def at(self, nbytes: float, ranks: int) -> str:
        """The winner at the size measured that is nearest, by ratio.

        Raises:
            BadArgument: so many ranks were not measured.
        """
        if why := self.refusal(ranks):
            raise BadArgument(f"fastest({self.path!r})", why)
        sizes = self.by_size[ranks]
        return sizes[min(sizes, key=lambda size: abs(math.log(size / max(nbytes, 1))))]

    def refusal(self, ranks: int) -> str:
        """Why nothing is known for so many ranks; empty when something is."""
        if ranks == 1 or ranks in self.by_size:
            return ""
        known = ", ".join(map(str, sorted(self.by_size)))
        return (
            f"{self.path} has measured {known} ranks, not {ranks}; plain fastest measures by itself"
        )


def winners(path: str) -> Winners:
    """Read a report of ``shoal bench routes``.

    Raises:
        BadArgument: there is no such file, or it is something else.
    """
    call, hint = f"fastest({path!r})", "make one: shoal bench routes --json PATH"
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))["results"]
        found: dict[int, dict[int, str]] = {}
        for ranks, nbytes, route in _read(results):
            found.setdefault(ranks, {})[nbytes] = route
    except OSError as error:
        raise BadArgument(call, f"cannot be read ({error.strerror}); {hint}") from None
    except (ValueError, KeyError, TypeError):
        raise BadArgument(call, f"is not a report of shoal bench routes; {hint}") from None
    if not found:
        raise BadArgument(call, f"tells of no winner; {hint}")
    return Winners(path, found)


def _read(results: object) -> Iterator[tuple[int, int, str]]:
    if not isinstance(results, list):
        raise TypeError("results")
    for row in results:
        if row["metric"] == WINNER:
            nbytes, ranks, route = read_case(row["case"])
            if not route:
                raise ValueError(row["case"])
            yield ranks, nbytes, route


def read_case(case: str) -> tuple[int, int, str]:
    """Bytes, ranks and the first route of a case.

    >>> read_case("4KB, 2 ranks: ring or tree"), read_case("16MB, 4 ranks")
    ((4096, 2, 'ring'), (16777216, 4, ''))

    Raises:
        ValueError: it is no case of that suite.
    """
    found = _CASE.fullmatch(case)
    if found is None:
        raise ValueError(case)
    number, unit, ranks, route = found.groups()
    return int(number) * UNITS.get(unit, 1), int(ranks), route or ""
