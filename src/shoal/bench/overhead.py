"""Suite ``overhead``: what the framework itself costs.

* A step of Shoal against one of torch DDP on gloo: same model, data and buckets, 2 workers.
* On one worker, against a bare PyTorch loop, in CPU time.
* With the timeline's recorder on, against off.
* ``import shoal`` after ``import torch``.

The first three are timed in interleaved blocks with an A/A control (see ``blocks`` and
``statistics``): the peer runs twice, as two contenders, and what tells them apart is noise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from shoal.bench.blocks import Plan, measure
from shoal.bench.form import Bar, Result
from shoal.bench.statistics import MIN_BLOCKS, Estimate, Timings, compare, estimate
from shoal.bench.suites import Settings, Suite

MODELS = ("mlp", "resnet", "gpt")


@dataclass(frozen=True)
class Duel:
    """One contender against another: what is compared, and the bar of the ratio.

    Attributes:
        subject: the contender that must keep the bar.
        peer: the one it is measured against.
        metric: what is timed, for the report.
        label: the peer's name in the report, with the settings that matter.
        bar: of the ratio; None for a figure that is only told.
        workers: how many processes.
    """

    subject: str
    peer: str
    metric: str
    label: str
    bar: str | None
    workers: int = 2


_DDP = "DDP(gradient_as_bucket_view=True"
STEP = Duel("shoal", "ddp", "step time", f"{_DDP})", "<= 1.02")
# DDP broadcasts BatchNorm's buffers before every forward; told also against one that does not.
BUFFERS = Duel(
    "shoal", "ddp, local buffers", "step time", f"{_DDP}, broadcast_buffers=False)", None
)
CPU = Duel("shoal", "bare", "CPU time of a step", "bare PyTorch loop", "<= 1.01", workers=1)
TIMELINE = Duel("shoal", "shoal, no timeline", "step time with timeline", "without", "<= 1.01")


def duels(quick: bool) -> Iterator[tuple[Duel, str]]:
    """Who meets on which model."""
    yield from ((STEP, model) for model in MODELS)
    yield from ((CPU, model) for model in (MODELS[:1] if quick else MODELS))
    if not quick:
        yield TIMELINE, "mlp"
        yield BUFFERS, "resnet"


def run(settings: Settings) -> Iterator[Result]:
    """Every measurement of the suite, one after the other."""
    for duel, model in duels(settings.quick):
        yield from fight(duel, model, settings)
    yield importing(settings)


SUITE = Suite("overhead", "what the framework costs over DDP, a bare loop and import torch", run)


def fight(duel: Duel, model: str, settings: Settings) -> Iterator[Result]:
    """Time a duel on a model, and judge it."""
    # Many short blocks: what disturbs the machine then falls on few of them.
    blocks = MIN_BLOCKS if settings.quick else 5 * MIN_BLOCKS
    case = f"{model}, {duel.workers} worker{'s'[: duel.workers - 1]}"
    rounds = 1 if settings.quick else 3
    plan = Plan(
        model, duel.subject, duel.peer, duel.workers, blocks, rounds=rounds, seed=settings.seed
    )
    timings = measure(plan, partial(settings.progress, f"{case}: {duel.metric}"))
    yield from judge(duel, case, timings)


def judge(duel: Duel, case: str, timings: Timings) -> Iterator[Result]:
    """The subject's row, then the control's."""
    found = compare(timings)
    holds = None if duel.bar is None else found.holds(Bar.parse(duel.bar))
    yield replace(_row(duel, case, timings.subject, found.ratio), bar=duel.bar, holds=holds)
    yield _row(duel, f"{case}, A/A", timings.twin, found.control)


def _row(duel: Duel, case: str, seconds: Sequence[float], ratio: Estimate) -> Result:
    milliseconds = 1e3 * median(seconds)
    return Result(case, duel.metric, milliseconds, "ms", duel.label, ratio.value, ratio.interval)


_IMPORT = """
import time, json
begin = time.perf_counter(); import torch
middle = time.perf_counter(); import shoal
print(json.dumps([time.perf_counter() - middle, middle - begin]))
"""


def importing(settings: Settings, bar: str = "<= 0.3") -> Result:
    """Seconds that ``import shoal`` adds to ``import torch``, each time in a new interpreter."""
    times = 6 if settings.quick else MIN_BLOCKS  # six are the fewest that give a 95 % interval
    case, added = "import shoal", []
    for done in range(times):
        settings.progress(case, done, times)
        told = subprocess.run(
            [sys.executable, "-c", _IMPORT], check=True, capture_output=True, text=True
        )
        added.append(float(json.loads(told.stdout)[0]))
    found = estimate(added)
    return Result(
        case,
        "time added to import torch",
        found.value,
        "s",
        interval=found.interval,
        bar=bar,
        holds=Bar.parse(bar).met(found.value),
    )
