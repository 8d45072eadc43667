"""``shoal bench`` as typed: listing, exit codes, files, and what is refused before it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from shoal import bench as benchmarks
from shoal.bench.report import Interval, Report, Result
from shoal.bench.suites import BenchSettings, Suite
from shoal.cli import main
from shoal.cli.bench import bench, summary, writable
from shoal.errors import BadArgument, UnknownName, UsageError
from shoal.timeline.files import replace_text

GOOD = Result("mlp", "step", 42.0, "ms", "ddp", 1.01, Interval(0.99, 1.03), "<= 1.02", True)
BAD = Result("gpt [big]", "step", 50.0, "ms", "ddp", 1.5, Interval(1.4, 1.6), "<= 1.02", False)
OPEN = Result("cnn", "step", 7.0, "ms", "ddp", 1.5, Interval(1.2, 1.8), "<= 1.02", None)
PLAIN = Result("mlp", "parameters", 5.5, "M")

ran: list[BenchSettings] = []


def _suite(name: str, *rows: Result) -> Suite:
    def run(settings: BenchSettings) -> Iterator[Result]:
        ran.append(settings)
        settings.progress(name, 1, 2)
        yield from rows

    return Suite(name, f"the {name} one", run)


def _stopped(settings: BenchSettings) -> Iterator[Result]:
    yield GOOD
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def suites(monkeypatch: pytest.MonkeyPatch) -> None:
    ran.clear()
    made = (
        _suite("good", GOOD, PLAIN),
        _suite("bad", GOOD, OPEN, BAD),
        _suite("open", GOOD, OPEN),
        Suite("stopped", "is stopped", _stopped),
    )
    monkeypatch.setattr(benchmarks, "SUITES", made)


def shoal(*words: str) -> Any:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "160"})


def test_list_shows_every_suite_with_its_line_and_runs_none() -> None:
    done = shoal("--list")
    assert done.exit_code == 0
    for name in ("good", "bad", "open"):
        assert name in done.stdout
        assert f"the {name} one" in done.stdout
    assert not ran


@pytest.mark.parametrize(("suite", "code"), [("good", 0), ("bad", 1), ("open", 3)])
def test_the_exit_code_tells_the_verdict(suite: str, code: int) -> None:
    assert shoal(suite).exit_code == code
    assert len(ran) == 1


def test_a_log_has_a_line_for_whatever_is_being_measured() -> None:
    done = shoal("good")
    assert "0:00 good (1 of 2)" in done.stderr
    assert "1 of 2" not in done.stdout


def test_a_long_case_stands_on_one_line_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long = replace(GOOD, case="mlp, 1gbit, 3 seeds: all_reduce, bsp, wfbp, error_feedback(x)")
    monkeypatch.setattr(benchmarks, "SUITES", (_suite("long", long),))
    assert long.case in shoal("long").stdout


def test_ctrl_c_shows_and_keeps_what_was_measured(tmp_path: Path) -> None:
    done = shoal("stopped", "--json", str(tmp_path / "report.json"))
    assert done.exit_code == 130
    assert "0.990 .. 1.030" in done.stdout
    assert "stopped by Ctrl-C: only 1 results were measured" in done.stdout
    assert Report.from_json((tmp_path / "report.json").read_text()).results == (GOOD,)


def test_the_table_shows_numbers_intervals_bars_and_verdicts() -> None:
    shown = shoal("bad").stdout
    for text in ("42 ms", "1.010", "0.990 .. 1.030", "ddp", "<= 1.02", "pass", "fail"):
        assert text in shown
    assert "inconclusive" in shown
    assert "gpt [big]" in shown  # brackets are text, not markup
    assert "torch 2" in shown
    assert "cores" in shown


def test_the_report_is_kept_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert shoal("bad", "--quick", "--json", str(path)).exit_code == 1
    report = Report.from_json(path.read_text(encoding="utf-8"))
    assert report.results == (GOOD, OPEN, BAD)
    assert report.header.suite == "bad"
    assert os.listdir(tmp_path) == ["report.json"]


def test_quick_and_seed_reach_the_suite() -> None:
    shoal("good", "--quick", "--seed", "4")
    assert (ran[0].quick, ran[0].seed) == (True, 4)


def test_an_unknown_suite_is_refused_with_the_nearest_name() -> None:
    error = shoal("goood").exception
    assert isinstance(error, UnknownName)
    assert error.exit_code == 2
    assert "did you mean good" in str(error)


def test_no_suite_is_refused_with_all_names() -> None:
    error = shoal().exception
    assert isinstance(error, UsageError)
    assert "one of: good, bad, open" in str(error)


@pytest.mark.parametrize("place", ["missing/report.json", ".", "/proc/report.json", "/dev/null"])
def test_a_place_that_cannot_be_written_is_refused_before_the_suite_runs(
    place: str, tmp_path: Path
) -> None:
    error = shoal("good", "--json", str(tmp_path / place)).exception
    assert isinstance(error, BadArgument)
    assert error.exit_code == 2
    assert "--json" in str(error)
    assert not ran


def test_a_report_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    replace_text(path, "old")

    def broken(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="disk full"):
        replace_text(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_link_is_followed_to_the_file_it_names(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "there" / "report.json")
    assert writable(link) == tmp_path / "there" / "report.json"


def test_trying_a_place_leaves_nothing_there(tmp_path: Path) -> None:
    writable(tmp_path / "report.json")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--list",), 0),
        (("good",), 0),
        (("bad",), 1),
        (("goood",), 2),
        ((), 2),
        (("good", "--json", "/missing/report.json"), 2),
        (("open", "--quick"), 3),
    ],
)
def test_the_command_as_installed_ends_with_the_code(words: tuple[str, ...], code: int) -> None:
    assert main(["bench", *words]) == code


def test_a_report_ends_with_how_many_bars_hold_and_which_do_not() -> None:
    rows = (
        Result("a", "time", 1.0, "s", threshold="<= 2", passes=True),
        Result("b", "time", 3.0, "s", threshold="<= 2", passes=False),
        Result("c", "time", 5.0, "s", "peer", 0.5, threshold="<= 1", passes=None),
        Result("d", "time", 1.0, "s"),
    )
    assert summary(rows).splitlines() == [
        "1 of 3 thresholds pass",
        "fail: b, time 3.000 (<= 2)",
        "inconclusive: c, time 0.500 (<= 1)",
    ]
