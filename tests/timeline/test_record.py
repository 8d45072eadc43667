"""Laws of recording and of the files that workers leave."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from shoal.errors import BadArgument, UsageError
from shoal.timeline import NullRecorder, Recorder, Timeline, collect


def test_what_is_added_is_recorded() -> None:
    recorder = Recorder(3)
    recorder.add("exchange", "bucket 0", time.perf_counter(), 0.25, 1024, 7)
    (span,) = recorder.timeline().spans
    assert (span.worker, span.lane, span.name) == (3, "exchange", "bucket 0")
    assert (span.seconds, span.nbytes, span.step) == (0.25, 1024, 7)
    assert span.start >= 0


def test_a_span_is_timed_and_may_learn_its_size_late() -> None:
    recorder = Recorder(0)
    before = time.perf_counter()
    with recorder.span("exchange", "bucket 1", step=2) as span:
        span.nbytes = 99
    after = time.perf_counter()
    (found,) = recorder.timeline().spans
    assert (found.nbytes, found.step) == (99, 2)
    assert 0 <= found.seconds <= after - before + 1e-8


def test_a_span_that_raises_is_recorded_and_the_error_goes_on() -> None:
    recorder = Recorder(0)
    with pytest.raises(KeyError), recorder.span("compute", "forward"):
        raise KeyError
    assert len(recorder.timeline().spans) == 1


def test_the_null_recorder_records_and_writes_nothing(tmp_path: Path) -> None:
    recorder = NullRecorder()
    recorder.add("compute", "forward", 0.0, 1.0)
    with recorder.span("compute", "forward") as span:
        span.nbytes = 3
    assert not recorder.enabled
    assert recorder.timeline().spans == ()
    assert recorder.write(tmp_path) is None
    assert not os.listdir(tmp_path)


def test_memory_is_bounded_and_what_was_dropped_is_counted_by_whole_steps() -> None:
    recorder = Recorder(5, capacity=10)
    for step in range(8):
        for name in ("forward", "backward", "update"):
            recorder.add("compute", name, float(step), 0.1, 0, step)
    timeline = recorder.timeline()
    assert timeline.steps == (5, 6, 7)  # of step 4 only the update was left
    assert timeline.meta["dropped"] == {"5": 24 - 9}


def test_spans_of_no_step_outlive_a_dropped_one() -> None:
    recorder = Recorder(0, capacity=2)
    for _ in range(3):
        recorder.add("compute", "set-up", 0.0, 0.1)
    assert len(recorder.timeline().spans) == 2
    assert recorder.timeline().meta["dropped"] == {"0": 1}


def test_nothing_is_said_of_dropping_when_nothing_was() -> None:
    recorder = Recorder(0, capacity=1)
    recorder.add("wait", "x", 0.0, 0.1)
    assert "dropped" not in recorder.timeline().meta


def test_threads_lose_no_spans() -> None:
    recorder = Recorder(0)

    def work() -> None:
        for step in range(2_000):
            recorder.add("exchange", "x", 0.0, 0.1, 0, step)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    recorder.timeline()  # while they add
    for thread in threads:
        thread.join()
    assert len(recorder.timeline().spans) == 8_000


def test_recorders_of_one_host_align() -> None:
    first, second = Recorder(0), Recorder(1)
    now = time.perf_counter()
    for recorder in (first, second):
        recorder.add("compute", "x", now, 0.1, 0, 0)
    a, b = first.timeline().merge(second.timeline()).spans
    assert abs(a.start - b.start) < 0.01


def test_another_hosts_clock_is_corrected_by_its_offset() -> None:
    here, there = Recorder(0), Recorder(1, offset=5.0)
    now = time.perf_counter()
    for recorder in (here, there):
        recorder.add("compute", "x", now, 0.1, 0, 0)
    a, b = here.timeline().merge(there.timeline()).spans
    assert b.start - a.start == pytest.approx(5.0, abs=0.01)


def test_a_recorder_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(BadArgument, match="capacity"):
        Recorder(0, capacity=0)


def record(directory: Path, worker: int, *, workers: int = 3) -> Path:
    recorder = Recorder(worker)
    for step in range(2):
        recorder.add("compute", "forward", time.perf_counter(), 0.1, 0, step)
    path = recorder.write(directory, {"workers": workers})
    assert path is not None
    return path


def test_every_workers_file_is_collected(tmp_path: Path) -> None:
    for worker in range(3):
        record(tmp_path, worker)
    timeline = collect(tmp_path)
    assert timeline.workers == (0, 1, 2)
    assert not timeline.meta.keys() & {"torn", "missing"}
    assert sorted(os.listdir(tmp_path)) == [f"spans-{w}.jsonl" for w in range(3)]


def test_a_missing_worker_is_named(tmp_path: Path) -> None:
    record(tmp_path, 0)
    record(tmp_path, 2)
    assert collect(tmp_path).meta["missing"] == [1]


def test_of_a_torn_file_what_can_be_read_is_kept(tmp_path: Path) -> None:
    record(tmp_path, 0)
    torn = record(tmp_path, 1)
    torn.write_bytes(torn.read_bytes()[:-10])
    record(tmp_path, 2).write_bytes(b"\xff\x00 garbage")
    timeline = collect(tmp_path)
    assert [s.worker for s in timeline.spans].count(1) == 1
    assert timeline.meta["torn"].keys() == {"1", "2"}


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    record(tmp_path, 0, workers=1)
    (tmp_path / "spans-x.jsonl").write_text("no")
    (tmp_path / ".spans-1.jsonl.tmp").write_text("no")
    assert collect(tmp_path).workers == (0,)


def test_a_directory_with_no_spans_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no spans-\*\.jsonl"):
        collect(tmp_path / "nowhere")


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record(tmp_path, 0)
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        record(tmp_path, 0)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["spans-0.jsonl"]
    assert Timeline.from_json(before).workers == (0,)
