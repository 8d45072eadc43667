"""Every product of every axis: which are legal, which differ in their numbers, which cover pairs.

The promise of six independent axes is that any product either says why it cannot be, or trains.
These functions make that promise testable without running what was run already under another name.
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

Answers = Mapping[str, Sequence[Any]]
WORLDS = range(1, 9)


def answers(*own: Callable[..., Any]) -> dict[str, list[Any]]:
    """Every sample of every member, by axis; members of one's own besides."""
    made = {axis: [make(t) for f in fs for t in samples(f)] for axis, fs in AXES.items()}
    kinds = {type(values[0]): axis for axis, values in made.items()}
    for function in own:
        for text in samples(function):
            value = make(text, function)
            made[kinds[type(value)]].append(value)
    return made


def products(given: Answers) -> Iterator[dict[str, Any]]:
    """One answer an axis, in every way."""
    for row in itertools.product(*given.values()):
        yield dict(zip(given, row, strict=True))


def legal(product: Mapping[str, Any]) -> Strategy | None:
    """The strategy that a product makes, or None where it says why it cannot be."""
    try:
        return Strategy(**product)
    except ConflictError as error:
        if any(not (c.what and c.why and c.instead) for c in error.conflicts):
            raise AssertionError(f"{product}: a conflict without reason or way out") from error
        return None


def facts(answer: Any) -> Hashable:
    """All that rules may decide on: what an answer declares, not what it is called.

    Of a route: whether it is one, and which numbers of workers it refuses.
    """
    if isinstance(answer, Collective):
        return answer.is_native, tuple(bool(answer.refusal(world)) for world in WORLDS)
    declared = (field.name for field in fields(answer) if field.compare and field.name != "name")
    return tuple(getattr(answer, name) for name in declared)


def kinds(given: Answers) -> list[list[list[Any]]]:
    """The answers of each axis, those together of which rules know the same."""
    made = []
    for values in given.values():
        alike: dict[Hashable, list[Any]] = {}
        for value in values:
            alike.setdefault(facts(value), []).append(value)
        made.append(list(alike.values()))
    return made


def legal_products(given: Answers) -> list[tuple[Any, ...]]:
    """Every legal row of answers: decided once for all rows of which rules know the same."""
    found: list[tuple[Any, ...]] = []
    for row in itertools.product(*kinds(given)):
        if legal({axis: kind[0] for axis, kind in zip(given, row, strict=True)}) is not None:
            found += itertools.product(*row)
    return found


def computation(s: Strategy) -> tuple[object, ...]:
    """What the numbers of a strategy depend on; on as many workers, one key trains alike.

    The route adds the same numbers up; the order of messages matters to who slices only, and
    slicing only to compressors that look at more than one entry; whoever carries a mean of all,
    the mean is the same; and inside a cut replica nothing changes what replicas agree on.
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
    """Few rows in which every combination of ``strength`` entries of the rows still occurs.

    Greedy: the row with the most that is new comes next. What a row adds only ever shrinks, so a
    heap of old promises finds it without looking at all rows again.
    """
    offers = [_combinations(row, strength) for row in rows]
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


def _combinations(row: Sequence[Hashable], strength: int) -> set[Hashable]:
    return set(itertools.combinations(enumerate(row), strength))
