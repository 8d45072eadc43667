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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from shoal.bench.blocks import Plan, Seconds, measure
from shoal.bench.contenders import BUCKET_MB
from shoal.bench.form import Bar, Result
from shoal.bench.statistics import MIN_BLOCKS, Estimate, compare, estimate, verdict
from shoal.bench.suites import Settings, Suite

MODELS = ("mlp", "resnet", "gpt")


@dataclass(frozen=True)
class Duel:
    """One contender against another: what is compared, and the bar of the ratio.

    Attributes:
        subject: the contender that must keep the bar.
        against: its peer, which also runs a second time as the control.
        metric: what is timed, for the report.
        label: the peer's name in the report, with the settings that matter.
        bar: of the ratio; empty for a figure that is only told.
        workers: how many processes.
        beside: a second peer, told without a bar.
    """

    subject: str
    against: str
    metric: str
    label: str
    bar: str
    workers: int = 2
    beside: str = ""


_DDP = f"ddp(bucket_cap_mb={BUCKET_MB}, gradient_as_bucket_view=True)"
STEP = Duel("shoal", "ddp", "step time", _DDP, "<= 1.02")
# DDP broadcasts BatchNorm's buffers before every forward; told also against one that does not.
BUFFERS = Duel("shoal", "ddp", "step time", _DDP, "<= 1.02", beside="ddp, local buffers")
CPU = Duel("shoal", "bare", "CPU time of a step", "bare PyTorch loop", "<= 1.01", workers=1)
TIMELINE = Duel("shoal, timeline", "shoal", "step time", "recorder off", "<= 1.01")


def run(settings: Settings) -> Iterator[Result]:
    """Every measurement of the suite, one after the other."""
    for model in MODELS:
        duel = BUFFERS if model == "resnet" else STEP
        yield from fight(duel, model, settings)
    for model in MODELS[:1] if settings.quick else MODELS:
        yield from fight(CPU, model, settings)
    yield from fight(TIMELINE, "mlp", settings)
    yield importing(settings)


SUITE = Suite("overhead", "what the framework costs over DDP, a bare loop and import torch", run)


def fight(duel: Duel, model: str, settings: Settings) -> Iterator[Result]:
    """Time a duel on a model; the control's row first, then the verdict, then who stood beside."""
    names = (duel.subject, duel.against, duel.against, *filter(None, [duel.beside]))
    # Many short blocks: what disturbs the machine then falls on few of them.
    blocks = MIN_BLOCKS if settings.quick else 5 * MIN_BLOCKS
    case = f"{model}, {duel.workers} worker{'s'[: duel.workers - 1]}"
    plan = Plan(model, names, duel.workers, blocks, seed=settings.seed)
    timings = measure(plan, partial(settings.progress, f"{case}: {duel.metric}"))
    return judge(duel, case, timings)


def judge(duel: Duel, case: str, timings: list[Seconds]) -> Iterator[Result]:
    """The rows that the timings of subject, peer, control and perhaps another peer make."""
    subject, against, twin, *beside = timings
    control, found = compare(twin, against), compare(subject, against)
    yield _row(duel, f"{case}: A/A control", twin, control)
    width = control.interval.half_width
    holds = verdict(Bar.parse(duel.bar), found.value, half_width=width)
    yield replace(_row(duel, case, subject, found), bar=duel.bar, holds=holds)
    for other in beside:
        told = _row(duel, case, subject, compare(subject, other))
        yield replace(told, against=duel.beside)


def _row(duel: Duel, case: str, seconds: Seconds, ratio: Estimate) -> Result:
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
    case, added = "import shoal after import torch", []
    for done in range(times):
        settings.progress(case, done, times)
        told = subprocess.run(
            [sys.executable, "-c", _IMPORT], check=True, capture_output=True, text=True
        )
        added.append(float(json.loads(told.stdout)[0]))
    found = estimate(added)
    return Result(
        case,
        "import time",
        found.value,
        "s",
        interval=found.interval,
        bar=bar,
        holds=Bar.parse(bar).met(found.value),
    )
