"""Laws of the trace: what Perfetto needs to show it."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shoal.timeline import Span, Timeline, trace, write_trace

TIMELINE = Timeline(
    [
        Span(0, "compute", "forward", 10.0, 0.5, 0, 4),
        Span(0, "exchange", "bucket 0", 10.2, 0.4, 800, 4),
        Span(0, "exchange", "bucket 1", 10.4, 0.4, 900, 4),  # overlaps, and does not nest
        Span(1, "wait", "wait", 10.1, 0.1, 0, 4),
        Span(1, "data", "warm-up", 9.0, 0.5, 0, -1),
    ],
    {"strategy": "bsp"},
)


THIRDS = Timeline(Span(0, "compute", "x", i / 3, 1 / 3, 0, i) for i in range(200))


def events(kind: str) -> list[dict[str, Any]]:
    return [event for event in trace(TIMELINE)["traceEvents"] if event["ph"] == kind]


def test_every_span_is_an_event_in_microseconds_from_the_first() -> None:
    (found,) = (e for e in events("X") if e["name"] == "bucket 1")
    assert (found["ts"], found["dur"]) == (1.4e6, 4e5)
    assert found["args"] == {"nbytes": 900, "step": 4}
    assert (found["pid"], found["cat"]) == (0, "exchange")
    assert len([e for e in events("X") if e["cat"] != "step"]) == len(TIMELINE.spans)


def test_every_process_and_thread_has_a_name_and_a_place() -> None:
    used = {(e["pid"], e["tid"]) for e in events("X")}
    for kind in ("thread_name", "thread_sort_index"):
        assert {(e["pid"], e["tid"]) for e in events("M") if e["name"] == kind} == used
    for kind in ("process_name", "process_sort_index"):
        assert {e["pid"] for e in events("M") if e["name"] == kind} == {0, 1}
    names = {e["args"]["name"] for e in events("M") if e["name"] == "thread_name"}
    assert names == {"step", "compute", "exchange", "exchange 2", "wait", "data"}


def test_no_thread_is_the_idle_one() -> None:
    assert all(e["tid"] > 0 for e in events("X"))


@pytest.mark.parametrize("timeline", [TIMELINE, THIRDS])
def test_events_of_a_thread_do_not_overlap_by_a_nanosecond(timeline: Timeline) -> None:
    threads = defaultdict(list)
    for e in trace(timeline)["traceEvents"]:
        if e["ph"] == "X":
            start, dur = round(e["ts"] * 1e3), round(e["dur"] * 1e3)
            threads[e["pid"], e["tid"]].append((start, start + dur))
    for held in threads.values():
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(held)))


def test_every_step_of_every_worker_is_marked() -> None:
    marks = {e["pid"]: e for e in events("X") if e["cat"] == "step"}
    assert marks.keys() == {0, 1}
    assert (marks[0]["name"], marks[0]["dur"]) == ("step 4", 8e5)


def test_the_file_is_json_with_the_runs_facts(tmp_path: Path) -> None:
    write_trace(TIMELINE, tmp_path / "deep" / "trace.json")
    loaded = json.loads((tmp_path / "deep" / "trace.json").read_text())
    assert loaded == trace(TIMELINE)
    assert loaded["otherData"] == {"strategy": "bsp"}


def test_an_empty_timeline_is_an_empty_trace() -> None:
    assert trace(Timeline([]))["traceEvents"] == []
