"""Suites are found by name, run to the end, and get a header that says where they ran."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from shoal import bench
from shoal.bench import suites
from shoal.bench.report import Report, Result
from shoal.bench.suites import BenchSettings, Suite
from shoal.errors import UnknownName, UsageError


def _counting(settings: BenchSettings) -> Iterator[Result]:
    for i in range(3):
        settings.progress("counting", i, 3)
        yield Result(f"case {i}", "count", i + settings.seed, "")


COUNTING = Suite("counting", "counts to three", _counting)


def test_every_suite_is_found_by_its_name_and_has_one_line_of_summary() -> None:
    assert bench.SUITES
    assert len({suite.name for suite in bench.SUITES}) == len(bench.SUITES)
    for suite in bench.SUITES:
        assert bench.find(suite.name) is suite
        assert re.fullmatch(r"[a-z_]+", suite.name)
        assert 0 < len(suite.summary) < 80
        assert "\n" not in suite.summary


def test_an_unknown_suite_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownName, match="did you mean overhead"):
        bench.find("overhaed")


def test_a_checkout_has_the_acceptance_benchmarks_too() -> None:
    names = [suite.name for suite in bench.all_suites()]
    assert names == [*(suite.name for suite in bench.SUITES), *bench.ACCEPTANCE]


def test_without_a_checkout_an_acceptance_benchmark_says_that_it_needs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    assert bench.all_suites() == bench.SUITES
    for name in bench.ACCEPTANCE:
        with pytest.raises(UsageError, match="needs a source checkout") as refused:
            bench.find(name)
        assert "pip install -e" in str(refused.value)


def test_the_package_imports_no_acceptance_benchmark_by_name() -> None:
    for path in Path(bench.__file__).parents[1].rglob("*.py"):
        assert not re.search(r"^\s*(from|import) benchmarks\b", path.read_text(), re.MULTILINE)


def test_a_run_keeps_the_results_in_their_order_and_tells_progress() -> None:
    told: list[tuple[str, int, int]] = []
    report = suites.run(COUNTING, BenchSettings(seed=7, progress=lambda *each: told.append(each)))
    assert [result.value for result in report.results] == [7, 8, 9]
    assert told == [("counting", i, 3) for i in range(3)]
    assert report.header.seeds == (7,)
    assert Report.from_json(report.to_json()) == report


def test_what_was_measured_before_ctrl_c_is_kept() -> None:
    def stopped(settings: BenchSettings) -> Iterator[Result]:
        yield from list(_counting(settings))[:2]
        raise KeyboardInterrupt

    with pytest.raises(suites.Stopped) as caught:
        suites.run(Suite("stopped", "is stopped", stopped), BenchSettings(seed=7))
    assert [result.value for result in caught.value.report.results] == [7, 8]


def test_the_header_names_every_seed() -> None:
    suite = dataclasses.replace(COUNTING, seeds=3)
    assert suites.run(suite, BenchSettings(seed=7)).header.seeds == (7, 8, 9)
    assert suites.run(suite, BenchSettings(quick=True, seed=7)).header.seeds == (7,)


def test_the_header_tells_this_machine_and_this_moment() -> None:
    head = suites.header("counting", (0,))
    assert head.suite == "counting"
    assert head.machine.cpu
    assert 1 <= head.machine.cores <= (os.cpu_count() or 1)
    assert head.machine.memory_nbytes > 2**26
    assert {"python", "torch", "shoal"} <= set(head.versions)
    age = datetime.now(timezone.utc) - datetime.fromisoformat(head.date)
    assert timedelta(seconds=-1) <= age < timedelta(minutes=5)


def test_the_commit_is_a_hash_that_says_when_the_sources_were_edited() -> None:
    commit = suites.header("counting", ()).commit
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", commit)


def test_outside_of_its_repository_the_commit_is_unknown(tmp_path: Path) -> None:
    assert suites._commit(tmp_path) == "unknown"
    assert suites._commit(tmp_path / "gone") == "unknown"
