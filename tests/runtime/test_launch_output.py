"""What the user sees: whole lines with their rank, the first failure on top."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import LayoutMismatch, PeerLost, UsageError
from shoal.runtime.launcher import guard, processes, report
from shoal.runtime.launcher.output import CHUNK_NBYTES, PrefixedStream
from shoal.runtime.launcher.processes import Worker, clear_group, has_live_members, spawn
from shoal.runtime.launcher.report import WorkerExit, describe, oom_kills, signal_name
from shoal.runtime.world.failures import Failure, read_error_file, write_error_file
from shoal.strategy import parse


def lines(*chunks: bytes, colour: int | None = None) -> bytes:
    sink = io.BytesIO()
    line = PrefixedStream("rank 1", colour, sink)
    for chunk in chunks:
        line.feed(chunk)
    line.close()
    return sink.getvalue()


def test_every_line_carries_its_rank_however_it_arrives() -> None:
    assert lines(b"a\nb", b"c\n", b"d") == b"[rank 1] a\n[rank 1] bc\n[rank 1] d\n"


def test_a_line_without_end_is_shown_in_the_end() -> None:
    assert lines(b"x" * (CHUNK_NBYTES + 1)).startswith(b"[rank 1] xxx")


def test_what_a_progress_bar_drew_over_is_left_out() -> None:
    assert lines(b"10%\r50%\r100%\n") == b"[rank 1] 100%\n"
    assert lines(b"dos\r\n") == b"[rank 1] dos\n"


def test_torch_does_not_name_the_rank_a_second_time() -> None:
    assert lines(b"[rank1]: Traceback\n") == b"[rank 1] Traceback\n"


def test_colour_ends_before_the_text() -> None:
    assert lines(b"a\n", colour=32) == b"\x1b[32m[rank 1] \x1b[0ma\n"


def worker(tmp_path: Path, rank: int, code: int, **facts: float) -> Worker:
    started = subprocess.Popen([sys.executable, "-c", ""])
    started.wait()
    error = tmp_path / f"error-{rank}"
    made = Worker(f"rank {rank}", f"rank-{rank}", rank, started, error, tmp_path / "joined", code)
    made.ended = facts.get("ended", 0.0)
    made.stopped = bool(facts.get("stopped"))
    return made


def raised(rank: int, error: Exception, seconds: float) -> Failure:
    return Failure(rank, type(error).__name__, str(error), f"Traceback {error}", seconds=seconds)


def test_the_cause_comes_before_its_consequences(tmp_path: Path) -> None:
    exits = [
        WorkerExit(worker(tmp_path, 0, 1), raised(0, PeerLost("rank 1 failed"), 1.0)),
        WorkerExit(worker(tmp_path, 2, -15, ended=0.5, stopped=True), None),
        WorkerExit(worker(tmp_path, 1, 1), raised(1, ValueError("bad sample"), 2.0)),
    ]
    text = describe(exits, None).splitlines()
    assert text[0] == "rank 1 failed first: exit code 1"
    assert text[1] == "Traceback bad sample"
    assert text[2:] == [
        "then rank 0: exit code 1 (PeerLost: rank 1 failed)",
        "then rank 2: stopped by the launcher (SIGTERM)",
    ]


def test_what_all_say_is_said_once(tmp_path: Path) -> None:
    exits = [
        WorkerExit(worker(tmp_path, rank, 1), raised(rank, UsageError("no such name"), rank))
        for rank in range(3)
    ]
    text = describe(exits, None).splitlines()
    assert text[1:] == ["Traceback no such name", "the same error on rank 1, rank 2"]


def test_what_the_script_asked_wrongly_is_shown_at_its_own_line() -> None:
    try:
        parse("no_such_technique")
    except UsageError as error:
        shown = Failure.of(0, error).traceback
    assert f'File "{__file__}"' in shown
    assert 'parse("no_such_technique")' in shown
    assert "strategy.py" not in shown


def test_a_silent_worker_shows_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    log.write_text("one\ntwo\n")
    text = describe([WorkerExit(worker(tmp_path, 1, -9), None)], log)
    assert text.splitlines() == ["rank 1 failed first: killed by SIGKILL", "  | one", "  | two"]


def test_exit_codes_are_handed_on_as_a_shell_would(tmp_path: Path) -> None:
    assert WorkerExit(worker(tmp_path, 0, 3), None).code == 3
    assert WorkerExit(worker(tmp_path, 0, -9), None).code == 137
    usage = Failure.of(0, UsageError("no"))
    assert WorkerExit(worker(tmp_path, 0, 1), usage).code == 2


def test_a_kill_for_lack_of_memory_is_told_apart(tmp_path: Path) -> None:
    exits = [WorkerExit.read(worker(tmp_path, 0, c), out_of_memory=True) for c in (-9, -15, 1)]
    reasons = [ended.reason for ended in exits]
    assert "memory ran out" in reasons[0]
    assert reasons[1:] == ["killed by SIGTERM", "exit code 1"]


def test_counting_kills_reads_either_kind_of_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 2\noom_kill 2\n")
    monkeypatch.setattr(report, "_memory_events", lambda: [tmp_path / "absent", events])
    assert oom_kills() == 2


def test_signals_have_names() -> None:
    assert signal_name(9) == "SIGKILL"
    assert signal_name(250) == "signal 250"


def test_a_failure_survives_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    assert not write_error_file(Failure.of(0, ValueError("before")))
    monkeypatch.setenv("SHOAL_ERROR_FILE", str(path))
    failure = Failure.of(3, LayoutMismatch("lr"))
    assert write_error_file(failure)
    assert not write_error_file(Failure.of(3, ValueError("a second one")))
    assert read_error_file(path) == failure
    assert isinstance(failure.as_error(), LayoutMismatch)
    path.write_text(json.dumps({"rank": 0}))
    assert read_error_file(path) is None


def test_what_a_worker_started_ends_with_it() -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '600'])"
    process = spawn(["-c", code], {}, (None, None))
    process.wait()
    clear_group(process.pid)
    assert not has_live_members(process.pid)


def test_the_guard_kills_and_cleans_only_without_a_farewell(tmp_path: Path) -> None:
    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    directory = tmp_path / "run"
    directory.mkdir()
    try:
        lines_sent = [f"d {directory}\n", f"+{sleeper.pid}\n"]
        assert guard.watch([*lines_sent, "bye\n"]) == 0
        assert guard.watch([*lines_sent, f"-{sleeper.pid}\n", "bye\n"]) == 0
        assert directory.exists()
        assert sleeper.poll() is None
        assert guard.watch(lines_sent) == 1
        assert sleeper.wait() == -signal.SIGKILL
        assert not directory.exists()
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_guard_that_does_not_hear_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "DISMISS_SECONDS", 0.1)
    watcher = processes.GuardProcess(None)
    watcher._process.send_signal(signal.SIGSTOP)
    watcher.dismiss()
    assert watcher._process.returncode == -signal.SIGKILL
