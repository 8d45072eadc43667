"""List combinations of techniques: the legal ones, those that compute the same, and a covering set.

Any combination of the six axes must either train, or be refused with a reason. These functions help
to test this without running the same computation twice under different names.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from shoal import rules
from shoal.axes import AXES
from shoal.axes.collectives import Collective
from shoal.axes.compression import Trait
from shoal.errors import ConflictError
from shoal.strategy import Strategy
from shoal.testing.contracts.member import make, samples

ByAxis = Mapping[str, Sequence[Any]]
WORLDS = range(1, 9)


def samples_by_axis(*own: Callable[..., Any]) -> dict[str, list[Any]]:
    """Return all samples of Shoal's techniques and of the functions ``own``, by axis."""
    made = {axis: [make(t) for f in fs for t in samples(f)] for axis, fs in AXES.items()}
    kinds = {type(values[0]): axis for axis, values in made.items()}
    for function in own:
        for text in samples(function):
            value = make(text, function)
            made[kinds[type(value)]].append(value)
    return made


def products(techniques: ByAxis) -> Iterator[dict[str, Any]]:
    """Yield every combination of one technique per axis."""
    for row in itertools.product(*techniques.values()):
        yield dict(zip(techniques, row, strict=True))


def legal(product: Mapping[str, Any]) -> Strategy | None:
    """Return the strategy, or None if it is refused. Raise if a refusal lacks reason or advice."""
    try:
        return Strategy(**product)
    except ConflictError as error:
        if any(not (c.what and c.why and c.instead) for c in error.conflicts):
            why = f"{product}: a conflict has no reason or no alternative"
            raise AssertionError(why) from error
        return None


def facts(technique: Any) -> Hashable:
    """Return what rules may read of a technique, that is its compared fields without the name.

    For a route, return whether it is native, and which numbers of workers it refuses.
    """
    if isinstance(technique, Collective):
        return technique.is_native, tuple(bool(technique.refusal(world)) for world in WORLDS)
    declared = (field.name for field in fields(technique) if field.compare and field.name != "name")
    return tuple(getattr(technique, name) for name in declared)


def kinds(techniques: ByAxis) -> list[list[list[Any]]]:
    """Return the techniques of each axis, grouped by equal facts."""
    groups = []
    for values in techniques.values():
        alike: dict[Hashable, list[Any]] = {}
        for value in values:
            alike.setdefault(facts(value), []).append(value)
        groups.append(list(alike.values()))
    return groups


def legal_products(techniques: ByAxis) -> list[tuple[Any, ...]]:
    """Return every legal combination. The rules run once for all combinations of equal facts."""
    rows: list[tuple[Any, ...]] = []
    for row in itertools.product(*kinds(techniques)):
        if legal({axis: kind[0] for axis, kind in zip(techniques, row, strict=True)}) is not None:
            rows += itertools.product(*row)
    return rows


def computation(s: Strategy) -> tuple[object, ...]:
    """Return a key. Strategies with equal keys compute the same result.

    All routes compute the same sum. A schedule changes the result only if it slices tensors, and
    only for a compressor that is not ELEMENTWISE. The mean over all workers is the same on every
    wire. How a replica is cut does not change what the replicas average.
    """
    cut = s.scheduling.name if s.scheduling.slices else "whole"
    return (
        "alone" if s.partition.data == 1 else "cut" if s.partition.cuts else "whole",
        rules.sends_gradients(s),
        s.coordination.name if s.coordination.via == "peers" or s.coordination.outer else "all",
        (s.synchrony.period, s.synchrony.staleness),
        "any" if Trait.ELEMENTWISE in s.compression.traits else cut,
        s.compression.name,
    )


def cover(rows: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """Return the indices of a few rows with every combination of ``strength`` entries of any row.

    It always adds the row with the most new combinations. The number of new combinations of
    a row never grows, so a heap of old numbers finds this row without counting for all rows again.
    """
    offers: list[set[Hashable]]
    offers = [set(itertools.combinations(enumerate(row), strength)) for row in rows]
    heap = [(-len(offer), index) for index, offer in enumerate(offers)]
    heapq.heapify(heap)
    seen: set[Hashable] = set()
    chosen: list[int] = []
    while heap:
        promised, index = heapq.heappop(heap)
        new = len(offers[index] - seen)
        if new == -promised and new:
            chosen.append(index)
            seen |= offers[index]
        elif new:
            heapq.heappush(heap, (-new, index))
    return sorted(chosen)
