"""Suite ``overhead``: the time that the framework itself takes.

* A step of Shoal against a step of torch DDP on gloo, with the same model, data and buckets, on two
  workers.
* The CPU time of a step of Shoal against that of a plain PyTorch loop, on one worker.
* A step of Shoal with a timeline against a step without one.
* The time of ``import shoal`` after ``import torch``.

The first three are timed in blocks with an A/A control (see ``blocks`` and ``statistics``): two
instances of the peer are timed, and the difference between them is noise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from shoal.bench.blocks import TimingPlan, measure
from shoal.bench.report import Result, Threshold
from shoal.bench.statistics import MIN_BLOCKS, Estimate, Timings, compare, estimate
from shoal.bench.suites import BenchSettings, Suite

MODELS = ("mlp", "resnet", "gpt")


@dataclass(frozen=True)
class Comparison:
    """Two contenders to compare, and the threshold of the ratio of their times."""

    subject: str  # the contender that must meet the threshold
    peer: str
    metric: str  # what is timed, for the report
    label: str  # the peer's name in the report, with the settings that matter
    threshold: str | None  # limit of the ratio, or None if there is none
    workers: int = 2


_DDP = "DDP(gradient_as_bucket_view=True"
STEP = Comparison("shoal", "ddp", "step time", f"{_DDP})", "<= 1.02")
# DDP broadcasts the buffers of BatchNorm before every forward; BUFFERS compares without it.
BUFFERS = Comparison(
    "shoal", "ddp, local buffers", "step time", f"{_DDP}, broadcast_buffers=False)", None
)
CPU = Comparison("shoal", "bare", "CPU time of a step", "bare PyTorch loop", "<= 1.01", workers=1)
TIMELINE = Comparison(
    "shoal", "shoal, no timeline", "step time with timeline", "without", "<= 1.01"
)


def comparisons(quick: bool) -> Iterator[tuple[Comparison, str]]:
    """Yield each comparison with the name of its model."""
    yield from ((STEP, model) for model in MODELS)
    yield from ((CPU, model) for model in (MODELS[:1] if quick else MODELS))
    if not quick:
        yield TIMELINE, "mlp"
        yield BUFFERS, "resnet"


def run(settings: BenchSettings) -> Iterator[Result]:
    """Yield every result of the suite."""
    for comparison, model in comparisons(settings.quick):
        yield from measure_on(model, comparison, settings)
    yield import_time(settings)


SUITE = Suite("overhead", "what the framework costs over DDP, a bare loop and import torch", run)


def measure_on(model: str, comparison: Comparison, settings: BenchSettings) -> Iterator[Result]:
    """Time both contenders of a comparison on a model, and yield the results."""
    case = f"{model}, {comparison.workers} worker{'s'[: comparison.workers - 1]}"
    plan = TimingPlan(
        model,
        comparison.subject,
        comparison.peer,
        comparison.workers,
        # Many short blocks, so that a disturbance of the machine affects only a few of them.
        blocks=MIN_BLOCKS if settings.quick else 5 * MIN_BLOCKS,
        rounds=1 if settings.quick else 3,
        seed=settings.seed,
    )
    timings = measure(plan, partial(settings.progress, f"{case}: {comparison.metric}"))
    yield from judge(comparison, case, timings)


def judge(comparison: Comparison, case: str, timings: Timings) -> Iterator[Result]:
    """Yield the result of the subject with its verdict, then the result of the control."""
    paired, threshold = compare(timings), comparison.threshold
    passes = None if threshold is None else paired.passes(Threshold.parse(threshold))
    row = _row(comparison, case, timings.subject, paired.ratio)
    yield replace(row, threshold=threshold, passes=passes)
    yield _row(comparison, f"{case}, A/A", timings.twin, paired.control)


def _row(comparison: Comparison, case: str, seconds: Sequence[float], ratio: Estimate) -> Result:
    times = comparison.metric, 1e3 * median(seconds), "ms"
    return Result(case, *times, comparison.label, ratio.value, ratio.interval)


_IMPORT = """
import time, json
begin = time.perf_counter(); import torch
middle = time.perf_counter(); import shoal
print(json.dumps([time.perf_counter() - middle, middle - begin]))
"""


def import_time(settings: BenchSettings, threshold: str = "<= 0.3") -> Result:
    """Return the result for the time of ``import shoal`` after torch, in new interpreters."""
    repeats = 6 if settings.quick else MIN_BLOCKS  # six are the fewest that give a 95 % interval
    case, seconds = "import shoal", []
    for done in range(repeats):
        settings.progress(case, done, repeats)
        child = subprocess.run(
            [sys.executable, "-c", _IMPORT], check=True, capture_output=True, text=True
        )
        seconds.append(float(json.loads(child.stdout)[0]))
    added = estimate(seconds)
    row = Result(case, "time added to import torch", added.value, "s", interval=added.interval)
    passes = Threshold.parse(threshold).met(added.value)
    return replace(row, threshold=threshold, passes=passes)
