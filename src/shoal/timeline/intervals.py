"""Compute unions, intersections and rows of time intervals."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the time covered by any of ``intervals``, as sorted and disjoint intervals."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(disjoint: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in disjoint)


def intersect(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the time that both ``a`` and ``b`` cover; both must be results of :func:`union`."""
    shared: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            shared.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return shared


def pack(intervals: Sequence[Interval]) -> list[int]:
    """Return a row number for each of ``intervals``. Intervals of one row do not overlap.

    Intervals must be sorted by start. Each gets the lowest free row, so the number of rows is
    minimal.
    """
    rows: list[int] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # (end, row)
    for start, end in intervals:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, row))
        rows.append(row)
    return rows
