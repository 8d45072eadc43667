"""Laws of sets of time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.timeline.intervals import Interval, intersect, length, pack, union

# no time limits: the machine may be busy with other things
relaxed = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ticks = st.integers(0, 40)
intervals = st.lists(st.tuples(ticks, ticks).map(lambda pair: (min(pair), max(pair))), max_size=12)


def covered(some: list[Interval]) -> set[int]:
    """The whole ticks in ``some``, counted one by one: slow, and plainly right."""
    return {tick for start, end in some for tick in range(int(start), int(end))}


@relaxed
@given(intervals)
def test_a_union_covers_what_its_members_cover_once(some: list[Interval]) -> None:
    merged = union(some)
    assert covered(merged) == covered(some)
    assert length(merged) == len(covered(some))


@relaxed
@given(intervals)
def test_a_union_is_sorted_and_disjoint(some: list[Interval]) -> None:
    merged = union(some)
    assert all(a[1] < b[0] for a, b in pairwise(merged))


@relaxed
@given(intervals, intervals)
def test_an_intersection_covers_what_both_cover(a: list[Interval], b: list[Interval]) -> None:
    shared = intersect(union(a), union(b))
    assert covered(shared) == covered(a) & covered(b)
    assert length(shared) == len(covered(shared))


@relaxed
@given(intervals)
def test_within_a_row_nothing_overlaps(some: list[Interval]) -> None:
    some = sorted(some)
    rows = pack(some)
    for row in set(rows):
        held = [interval for interval, at in zip(some, rows, strict=True) if at == row]
        assert all(a[1] <= b[0] for a, b in pairwise(held))


@relaxed
@given(intervals)
def test_no_more_rows_are_used_than_intervals_meet(some: list[Interval]) -> None:
    some = sorted((start, end) for start, end in some if start < end)
    most = max((sum(s <= t < e for s, e in some) for t in range(41)), default=0)
    assert len(set(pack(some))) == most


@pytest.mark.parametrize("empty", [[], [(3.0, 3.0)], [(5.0, 4.0)]])
def test_no_time_is_no_interval(empty: list[Interval]) -> None:
    assert union(empty) == []
