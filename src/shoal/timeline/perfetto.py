"""A timeline as trace events, for https://ui.perfetto.dev and chrome://tracing.

A worker is a process, a lane a thread. Perfetto wants the events of one thread to nest, and
messages under way at once do not: each further one goes to a thread of its own.

References:
    `Why overlapping events are not displayed <https://perfetto.dev/docs/faq>`_.
    `Trace Event Format <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>`_.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.timeline.files import replace_text
from shoal.timeline.intervals import pack
from shoal.timeline.span import LANES, Span
from shoal.timeline.summary import windows
from shoal.timeline.timeline import Timeline

_THREADS = 1000  # thread ids per lane; 0 is left out, Perfetto takes it for the idle thread
_TRACKS = ("step", *LANES)


def trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as a JSON object: complete ("X") events in microseconds, and names."""
    zero = min((span.start for span in timeline.spans), default=0.0)
    events = [event for worker in timeline.workers for event in _named(worker)]
    tracks: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in (*_steps(timeline), *timeline.spans):
        tracks[span.worker, span.lane].append(span)
    for (worker, track), spans in tracks.items():
        events.extend(_thread(worker, track, spans, zero))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(timeline.meta)}


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the trace to ``path``; open it at https://ui.perfetto.dev."""
    replace_text(path, json.dumps(trace(timeline)))


def _steps(timeline: Timeline) -> list[Span]:
    """Each step of each worker as a span, so that boundaries can be seen."""
    found = sorted(windows(timeline.spans).items(), key=lambda item: item[1])
    return [
        Span(worker, "step", f"step {step}", start, end - start, 0, step)
        for (worker, step), (start, end) in found
    ]


def _named(worker: int) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", worker, 0, {"name": f"worker {worker}"})
    yield _meta("process_sort_index", worker, 0, {"sort_index": worker})


def _thread(worker: int, track: str, spans: list[Span], zero: float) -> Iterator[dict[str, Any]]:
    """The events of one lane, cut into threads where they overlap."""
    base = _TRACKS.index(track) * _THREADS + 1
    rows = pack([(span.start, span.end) for span in spans])
    for row in sorted(set(rows)):
        name = track if row == 0 else f"{track} {row + 1}"
        yield _meta("thread_name", worker, base + row, {"name": name})
        yield _meta("thread_sort_index", worker, base + row, {"sort_index": base + row})
    for span, row in zip(spans, rows, strict=True):
        start, end = (round((time - zero) * 1e9) for time in (span.start, span.end))
        yield {
            "ph": "X",
            "name": span.name,
            "cat": track,
            "pid": worker,
            "tid": base + row,
            "ts": start / 1e3,  # start and end rounded apart: neighbours never come to overlap
            "dur": (end - start) / 1e3,
            "args": {"nbytes": span.nbytes, "step": span.step},
        }


def _meta(kind: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}
