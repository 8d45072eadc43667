"""Where the time of the steps went, worker by worker.

The wall time of a step runs from its first span to the end of its last. A worker's wall time is
the *union* of its steps' windows: what lies between two steps belongs to neither, and where steps
overlap (the next forward starts while the last exchange is under way) time is not counted twice.
Within each lane spans may nest and overlap; their union counts.

Exchange under compute is *overlapped*: it costs nothing. The rest is *exposed*.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.timeline.intervals import Interval, intersect, length, union
from shoal.timeline.span import COMPUTE, DATA, EXCHANGE, LANES, WAIT, Span

PARTS = (COMPUTE, DATA, EXCHANGE, WAIT, "idle")
"""What a step's wall time is cut into; each moment goes to the first that covers it."""


class Row(NamedTuple):
    """One worker's steps, or all workers' (``worker`` is None); seconds are sums over steps."""

    worker: int | None
    steps: int
    wall: float
    compute: float
    data: float
    wait: float
    exchange: float
    overlapped: float  # exchange while this worker computes
    nbytes: int  # exchanged
    parts: tuple[float, ...]  # by PARTS; they sum to wall

    @property
    def exposed(self) -> float:
        """Exchange with no compute above it, in seconds."""
        return max(0.0, self.exchange - self.overlapped)

    @property
    def step_seconds(self) -> float:
        """Mean wall time of a step."""
        return self.per_step(self.wall)

    def per_step(self, seconds: float) -> float:
        """``seconds`` of the sum, as a mean per step; 0 when there are no steps."""
        return seconds / self.steps if self.steps else 0.0

    def share(self, seconds: float) -> float:
        """``seconds`` as a part of the wall time; 0 when there is none."""
        return seconds / self.wall if self.wall else 0.0


class Summary(NamedTuple):
    """A row per worker, and their sum."""

    rows: tuple[Row, ...]
    total: Row


def summarise(spans: Iterable[Span]) -> Summary:
    """Sum up ``spans``; those of no step are left out."""
    by_worker: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.step >= 0:
            by_worker[span.worker].append(span)
    rows = tuple(_row(worker, by_worker[worker]) for worker in sorted(by_worker))
    return Summary(rows, _total(rows))


def windows(spans: Iterable[Span]) -> dict[tuple[int, int], Interval]:
    """From first to last span of each (worker, step)."""
    found: dict[tuple[int, int], Interval] = {}
    for span in spans:
        if span.step < 0:
            continue
        key = span.worker, span.step
        start, end = found.get(key, (span.start, span.end))
        found[key] = min(start, span.start), max(end, span.end)
    return found


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
    """What each layer covers that no earlier one does, then what none covers."""
    covered: list[Interval] = []
    parts: list[float] = []
    for layer in layers:
        before = length(covered)
        covered = union([*covered, *layer])
        parts.append(max(0.0, length(covered) - before))
    return (*parts, max(0.0, wall - length(covered)))


def _total(rows: Sequence[Row]) -> Row:
    parts = tuple(sum(row.parts[i] for row in rows) for i in range(len(PARTS)))
    return Row(
        worker=None,
        steps=sum(row.steps for row in rows),
        wall=sum(row.wall for row in rows),
        compute=sum(row.compute for row in rows),
        data=sum(row.data for row in rows),
        wait=sum(row.wait for row in rows),
        exchange=sum(row.exchange for row in rows),
        overlapped=sum(row.overlapped for row in rows),
        nbytes=sum(row.nbytes for row in rows),
        parts=parts,
    )
