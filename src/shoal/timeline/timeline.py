"""A timeline: the sorted spans of all workers of one run, with facts about the run.

``meta`` holds the facts as JSON values. These keys have a meaning:

* ``title``, or ``strategy`` if there is no title: the title of the page;
* ``model``, ``workers``, ``samples_per_second``: shown first on the page;
* ``origin_ns``: the Unix time at which the clock of the spans is 0; ``merge`` uses it to align the
  clocks of several timelines;
* ``dropped`` ``{worker: number of dropped spans}``, ``torn`` ``{worker: why its file is
  incomplete}``, ``missing`` ``[worker without a file]``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import BadArgument, UnknownName, UsageError
from shoal.timeline.span import LANES, Span
from shoal.timeline.summary import Summary, summarise

FORMAT = "shoal-timeline-1"


@dataclass(frozen=True)
class Timeline:
    """Spans of all workers, sorted by start, and facts about the run."""

    spans: tuple[Span, ...]
    meta: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __init__(self, spans: Iterable[Span], meta: Mapping[str, Any] | None = None) -> None:
        """Check and sort ``spans``; convert ``meta`` to JSON values."""
        ordered = sorted(spans, key=lambda span: (span.start, span))
        for span in ordered:
            _check(span)
        object.__setattr__(self, "spans", tuple(ordered))
        object.__setattr__(self, "meta", as_json_value(meta or {}))

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that have spans, sorted."""
        return tuple(sorted({span.worker for span in self.spans}))

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that have spans, sorted."""
        return tuple(sorted({span.step for span in self.spans if span.step >= 0}))

    def between(self, first: int, stop: int) -> Timeline:
        """Return a timeline with only the spans of steps ``first <= step < stop``."""
        return Timeline((s for s in self.spans if first <= s.step < stop), self.meta)

    def merge(self, *others: Timeline) -> Timeline:
        """Return one timeline with all spans. ``origin_ns``, if present, aligns the clocks.

        Facts that are mappings (by worker) are merged. Of any other fact, the first value is used.
        """
        timelines = (self, *others)
        origins = [t.meta["origin_ns"] for t in timelines if "origin_ns" in t.meta]
        origin = min(origins, default=0)
        spans: list[Span] = []
        for t in timelines:
            delay = (t.meta.get("origin_ns", origin) - origin) / 1e9
            spans += (span._replace(start=span.start + delay) for span in t.spans)
        meta = _merge_facts(t.meta for t in timelines)
        if origins:
            meta["origin_ns"] = origin
        return Timeline(spans, meta)

    def to_json(self) -> str:
        """Return JSON lines: a header with the facts, then one line for each span."""
        header = {"format": FORMAT, "spans": len(self.spans), "meta": self.meta}
        return "".join(json.dumps(line) + "\n" for line in (header, *self.spans))

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Return the timeline that ``to_json`` wrote; raise a UsageError if a part is damaged."""
        timeline, problem = read_lines(text)
        if problem:
            raise UsageError(f"cannot read the timeline: {problem}; record it again")
        return timeline

    def summary(self) -> Summary:
        """Return how each worker spends the time of its steps."""
        return summarise(self.spans)


def read_lines(text: str) -> tuple[Timeline, str]:
    """Return the part of a timeline that can be read, and why the rest cannot ("" if complete)."""
    lines = text.splitlines()
    try:
        header = json.loads(lines[0])
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']!r}, not {FORMAT!r}")
        count, meta = int(header["spans"]), dict(header["meta"])
    except (IndexError, KeyError, TypeError, ValueError) as error:
        return Timeline(()), f"it has no valid header ({error})"
    spans: list[Span] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            spans.append(_span(json.loads(line)))
        except (TypeError, ValueError) as error:
            return Timeline(spans, meta), f"line {number}: {error}"
    problem = "" if len(spans) == count else f"it has {len(spans)} of {count} spans"
    return Timeline(spans, meta), problem


def as_json_value(value: Any) -> Any:
    """Return ``value`` as JSON values. A value that JSON cannot hold becomes text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): as_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json_value(item) for item in value]
    return str(value)


def _span(fields: Any) -> Span:
    worker, lane, name, start, seconds, nbytes, step = fields
    times = float(start), float(seconds)
    span = Span(int(worker), str(lane), str(name), *times, int(nbytes), int(step))
    _check(span)
    return span


def _check(span: Span) -> None:
    if span.lane not in LANES:
        raise UnknownName("lane", span.lane, LANES)
    if not (math.isfinite(span.start) and math.isfinite(span.seconds) and span.seconds >= 0):
        raise BadArgument(str(span), "start and seconds must be finite, and seconds not negative")


def _merge_facts(metas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for meta in metas:
        for key, value in meta.items():
            earlier = merged.setdefault(key, value)
            if isinstance(earlier, Mapping) and isinstance(value, Mapping):
                merged[key] = {**value, **earlier}
    return merged
