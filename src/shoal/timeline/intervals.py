"""Sets of time as sorted, disjoint intervals: spans nest and overlap, time is counted once."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time covered by any of ``intervals``; empty ones vanish."""
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
    """How long a set of disjoint intervals lasts."""
    return sum(end - start for start, end in disjoint)


def intersect(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The time in both of two unions."""
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
    """A row for each of ``intervals``, sorted by start, so that none overlap within a row.

    Each takes the lowest row that is free, so the number of rows is the least possible.
    """
    rows: list[int] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # (free again at, row)
    for start, end in intervals:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, row))
        rows.append(row)
    return rows
