"""Summarise how each worker spends the time of its steps.

The window of a step is from the start of its first span to the end of its last span. A worker's
wall time is the length of the *union* of these windows. Time between two steps is not counted. Two
steps overlap if a forward starts before the exchange of the previous step has ended. Such time is
counted once. Spans of a lane may overlap, too, and this time is also counted once.

Exchange during compute is *overlapped* and costs no time. All other exchange is *exposed*.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.timeline.intervals import Interval, intersect, length, union
from shoal.timeline.span import COMPUTE, DATA, EXCHANGE, LANES, WAIT, Span

PARTS = (COMPUTE, DATA, EXCHANGE, WAIT, "idle")
"""The parts of the wall time. Time that several lanes cover counts for the first in this order."""


class Row(NamedTuple):
    """Sums over all steps of one worker, or of all if ``worker`` is None. Times are in seconds."""

    worker: int | None
    steps: int
    wall: float
    compute: float
    data: float
    wait: float
    exchange: float
    overlapped: float  # exchange while this worker computes
    nbytes: int  # bytes sent
    parts: tuple[float, ...]  # seconds of each of PARTS, which add up to wall

    @property
    def exposed(self) -> float:
        """Seconds of exchange during which this worker does not compute."""
        return max(0.0, self.exchange - self.overlapped)

    @property
    def step_seconds(self) -> float:
        """Mean wall time of a step, in seconds."""
        return self.per_step(self.wall)

    def per_step(self, seconds: float) -> float:
        """Return ``seconds`` divided by the number of steps; 0 if there are none."""
        return seconds / self.steps if self.steps else 0.0

    def share(self, seconds: float) -> float:
        """Return ``seconds`` divided by the wall time; 0 if the wall time is 0."""
        return seconds / self.wall if self.wall else 0.0


class Summary(NamedTuple):
    """One row for each worker, and the sum of these rows."""

    rows: tuple[Row, ...]
    total: Row


def summarise(spans: Iterable[Span]) -> Summary:
    """Return the summary of ``spans``; spans that belong to no step are ignored."""
    by_worker: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.step >= 0:
            by_worker[span.worker].append(span)
    rows = tuple(_row(worker, by_worker[worker]) for worker in sorted(by_worker))
    parts = tuple(sum(row.parts[i] for row in rows) for i in range(len(PARTS)))
    names = [name for name in Row._fields if name not in ("worker", "parts")]
    sums = {name: sum(getattr(row, name) for row in rows) for name in names}
    return Summary(rows, Row(worker=None, parts=parts, **sums))


def windows(spans: Iterable[Span]) -> dict[tuple[int, int], Interval]:
    """Return the window of each step: {(worker, step): (start, end)}."""
    bounds: dict[tuple[int, int], Interval] = {}
    for span in spans:
        if span.step < 0:
            continue
        key = span.worker, span.step
        start, end = bounds.get(key, (span.start, span.end))
        bounds[key] = min(start, span.start), max(end, span.end)
    return bounds


def _row(worker: int, spans: Sequence[Span]) -> Row:
    steps = windows(spans)
    wall = length(union(steps.values()))
    lanes: dict[str, list[Interval]] = {
        lane: union((span.start, span.end) for span in spans if span.lane == lane) for lane in LANES
    }
    return Row(
        worker=worker,
        steps=len(steps),
        wall=wall,
        compute=length(lanes[COMPUTE]),
        data=length(lanes[DATA]),
        wait=length(lanes[WAIT]),
        exchange=length(lanes[EXCHANGE]),
        overlapped=length(intersect(lanes[EXCHANGE], lanes[COMPUTE])),
        nbytes=sum(span.nbytes for span in spans if span.lane == EXCHANGE),
        parts=_parts(wall, [lanes[lane] for lane in PARTS[:-1]]),
    )


def _parts(wall: float, layers: Iterable[list[Interval]]) -> tuple[float, ...]:
    """Return the seconds that each layer adds to the earlier layers, then the rest of ``wall``."""
    covered: list[Interval] = []
    parts: list[float] = []
    for layer in layers:
        before = length(covered)
        covered = union([*covered, *layer])
        parts.append(max(0.0, length(covered) - before))
    return (*parts, max(0.0, wall - length(covered)))
