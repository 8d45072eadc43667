"""The overhead suite: who meets whom, what is concluded, and that it runs (nothing is timed)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from shoal.bench import overhead
from shoal.bench.blocks import TimingPlan
from shoal.bench.contenders import CONTENDERS, WORKLOADS
from shoal.bench.overhead import CPU, MODELS, STEP, TIMELINE, Comparison, comparisons, judge
from shoal.bench.report import Result, Threshold
from shoal.bench.statistics import MIN_BLOCKS, Timings
from shoal.bench.suites import BenchSettings


def _timings(ratio: float, *, noise: float = 0.0, blocks: int = MIN_BLOCKS) -> Timings:
    """A subject ``ratio`` times its peer; the twin strays by ``noise``, up and down in turn."""
    stray = [1 + (noise if (i + 1) // 2 % 2 else -noise) for i in range(blocks)]
    return Timings([ratio] * blocks, [1.0] * blocks, stray)


@pytest.mark.parametrize(
    ("ratio", "noise", "passes"),
    [(1.0, 0.0, True), (1.03, 0.0, False), (1.03, 0.015, True), (1.0, 0.05, None)],
)
def test_a_comparison_is_judged_by_its_bar_and_its_control(
    ratio: float, noise: float, passes: bool | None
) -> None:
    row, control = judge(STEP, "mlp", _timings(ratio, noise=noise))
    assert row.passes is passes
    assert row.threshold == "<= 1.02"
    assert row.ratio == pytest.approx(ratio)
    assert row.against == control.against == STEP.label
    assert control.case == "mlp, A/A"
    assert control.threshold is None
    assert control.interval is not None
    assert control.interval.half_width == pytest.approx(noise, abs=1e-3)


def test_a_comparison_without_a_bar_has_no_verdict_to_give() -> None:
    row, _ = judge(overhead.BUFFERS, "resnet", _timings(9.0))
    assert row.passes is None
    assert not row.inconclusive


def test_times_are_told_in_milliseconds() -> None:
    row, _ = judge(STEP, "mlp", _timings(1.5))
    assert row.value == pytest.approx(1500)
    assert row.unit == "ms"


def test_the_bars_are_those_of_the_issue() -> None:
    assert (STEP.threshold, STEP.workers) == ("<= 1.02", 2)
    assert (CPU.threshold, CPU.workers, CPU.peer) == ("<= 1.01", 1, "bare")
    assert TIMELINE.threshold == "<= 1.01"
    assert MODELS == ("mlp", "resnet", "gpt")


@pytest.mark.parametrize("quick", [False, True])
def test_every_comparison_names_contenders_and_models_that_exist(quick: bool) -> None:
    met = list(comparisons(quick))
    assert [model for comparison, model in met if comparison is STEP] == list(MODELS)
    for comparison, model in met:
        assert {comparison.subject, comparison.peer} <= set(CONTENDERS)
        assert model in WORKLOADS
        assert comparison.threshold is None or Threshold.parse(comparison.threshold)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[TimingPlan]:
    """No workers and no new interpreters: every comparison is a tie, every import takes 0.1 s."""
    plans: list[TimingPlan] = []

    def measure(plan: TimingPlan, progress: Any) -> Timings:
        plans.append(plan)
        progress(plan.blocks, plan.blocks)
        return _timings(1.0, blocks=plan.blocks)

    def told(*words: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 0, json.dumps([0.1, 1.0]), "")

    monkeypatch.setattr(overhead, "measure", measure)
    monkeypatch.setattr(subprocess, "run", told)
    return plans


@pytest.mark.parametrize("quick", [False, True])
def test_the_suite_yields_every_bar_of_the_issue_from_enough_blocks(
    quick: bool, fake: list[TimingPlan]
) -> None:
    told: list[str] = []
    results = list(
        overhead.run(BenchSettings(quick, 5, progress=lambda what, done, total: told.append(what)))
    )
    barred = [(r.case, r.threshold) for r in results if r.threshold]
    for model in MODELS:
        assert (f"{model}, 2 workers", "<= 1.02") in barred
    assert ("mlp, 1 worker", "<= 1.01") in barred
    assert ("import shoal", "<= 0.3") in barred
    assert all(r.passes for r in results if r.threshold)
    assert all(plan.blocks >= MIN_BLOCKS and plan.seed == 5 for plan in fake)
    assert {r.case for r in results if r.threshold} <= {what.split(": ")[0] for what in told}


def test_importing_tells_seconds_with_an_interval(fake: list[TimingPlan]) -> None:
    result = overhead.import_time(BenchSettings(quick=True))
    assert result == Result(
        "import shoal",
        "time added to import torch",
        0.1,
        "s",
        interval=result.interval,
        threshold="<= 0.3",
        passes=True,
    )
    assert result.interval == (0.1, 0.1)


def test_the_script_that_times_an_import_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", overhead._IMPORT], check=True, capture_output=True, text=True
    )
    added, torch = json.loads(done.stdout)
    assert added >= 0
    assert torch > 0


@pytest.mark.gloo
def test_a_comparison_of_ddp_with_itself_runs_from_workers_to_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overhead, "MODELS", ("tiny",))
    comparison = Comparison("ddp", "ddp", "step time", "itself", "<= 1000")
    row, control = overhead.measure_on("tiny", comparison, BenchSettings(quick=True))
    assert row.case == "tiny, 2 workers"
    assert row.passes is not False
    assert control.value > 0
