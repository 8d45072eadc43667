"""All combinations of techniques: which are legal, which compute the same, which cover all pairs.

Any combination of the six axes must either train, or be refused with a reason. These functions test
that without running the same computation twice under different names.
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
    """Return every sample of every member, by axis; with members of the caller's ``own``."""
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
    """Return the strategy of a combination, or None if it is refused with a reason."""
    try:
        return Strategy(**product)
    except ConflictError as error:
        if any(not (c.what and c.why and c.instead) for c in error.conflicts):
            why = f"{product}: a conflict without a reason or an alternative"
            raise AssertionError(why) from error
        return None


def facts(technique: Any) -> Hashable:
    """Return all that rules may decide on: what a technique declares, not its name.

    For a route: whether it is native, and which numbers of workers it refuses.
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
    """Return every legal combination; those of equal facts are decided once."""
    rows: list[tuple[Any, ...]] = []
    for row in itertools.product(*kinds(techniques)):
        if legal({axis: kind[0] for axis, kind in zip(techniques, row, strict=True)}) is not None:
            rows += itertools.product(*row)
    return rows


def computation(s: Strategy) -> tuple[object, ...]:
    """Return what the result of a strategy depends on: equal keys train alike.

    Every route computes the same sum. The order of messages matters only if tensors are cut, and
    that only to compressors that look at more than one entry. A mean over all is the same on every
    wire. Cuts inside a replica do not change what replicas agree on.
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
    """Return few rows that contain every combination of ``strength`` entries of all rows.

    Greedy: the row with the most new combinations comes next. This number only ever shrinks, so a
    heap of old numbers finds the best row without counting all of them again.
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
