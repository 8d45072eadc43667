"""Export a timeline as trace events, for https://ui.perfetto.dev and chrome://tracing.

A worker becomes a process, and a lane becomes a thread. Perfetto does not show events of one thread
that overlap without nesting, as concurrent messages do. So spans of a lane that overlap are put on
several threads.

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

_THREADS = 1000  # number of thread ids for each lane; ids start at 1, because 0 is the idle thread
_TRACKS = ("step", *LANES)


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return the trace as a JSON object with complete events ("X"), in µs, and track names."""
    zero = min((span.start for span in timeline.spans), default=0.0)
    events = []
    for worker in timeline.workers:
        events.append(_meta("process_name", worker, 0, {"name": f"worker {worker}"}))
        events.append(_meta("process_sort_index", worker, 0, {"sort_index": worker}))
    tracks: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in (*_steps(timeline), *timeline.spans):
        tracks[span.worker, span.lane].append(span)
    for (worker, track), spans in tracks.items():
        events.extend(_thread(worker, track, spans, zero))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(timeline.meta)}


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the trace to ``path``. It can be opened at https://ui.perfetto.dev."""
    replace_text(path, json.dumps(trace(timeline)))


def _steps(timeline: Timeline) -> list[Span]:
    """Return one span for each step of each worker, which shows the bounds of the step."""
    steps = sorted(windows(timeline.spans).items(), key=lambda item: item[1])
    return [
        Span(worker, "step", f"step {step}", start, end - start, 0, step)
        for (worker, step), (start, end) in steps
    ]


def _thread(worker: int, track: str, spans: list[Span], zero: float) -> Iterator[dict[str, Any]]:
    """Yield the events of one lane, on several threads if they overlap."""
    base = _TRACKS.index(track) * _THREADS + 1
    rows = pack([(span.start, span.end) for span in spans])
    for row in sorted(set(rows)):
        name = track if row == 0 else f"{track} {row + 1}"
        yield _meta("thread_name", worker, base + row, {"name": name})
        yield _meta("thread_sort_index", worker, base + row, {"sort_index": base + row})
    for span, row in zip(spans, rows, strict=True):
        # round the end, not the duration, so that consecutive events do not overlap
        start, end = (round((time - zero) * 1e9) for time in (span.start, span.end))
        yield {
            "ph": "X",
            "name": span.name,
            "cat": track,
            "pid": worker,
            "tid": base + row,
            "ts": start / 1e3,
            "dur": (end - start) / 1e3,
            "args": {"nbytes": span.nbytes, "step": span.step},
        }


def _meta(kind: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}
