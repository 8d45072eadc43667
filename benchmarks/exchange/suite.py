"""Suite ``exchange``: does sending less, earlier or more seldom pay on a slow network?

Four hosts of one worker each (see :mod:`shoal.testbed`; root, Linux).

1. Time to loss, at 1 Gbit/s and at 100 Mbit/s: seconds of training until the held-out loss that DDP
   reaches in a fixed number of steps, by every strategy.
2. Lossless schedules against DDP's buckets, by step time; and how soon an adaptive schedule notices
   that the links have a tenth of their rate.
3. Bytes sent, counted at the sockets, against each technique's formula.
4. Time to encode and decode, for every compressor of the catalogue.
5. Time to loss with two more seeds: DDP, torch's PowerSGD hook, our powersgd, the two best of the
   first seed and the best that exchanges every step. They come last, because they are left out when
   time is short; the rows say so.

At 100 Mbit/s a step of DDP takes five seconds, so DDP runs only a few steps there. Its time to the
loss is that of all its steps at their median, and the loss is that of the run at 1 Gbit/s with the
same seed: the rate of the network does not change what DDP computes. Contenders are built, which
sends the whole model, before the links are slowed down.

A part that fails becomes a row that says why, and the other parts go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from benchmarks.exchange import contenders, link_change, schedules
from benchmarks.exchange.codec import costs
from benchmarks.exchange.formulas import Sent, sent_rows
from benchmarks.exchange.jobs import Cluster, JobFailed, run_job
from benchmarks.exchange.results import Results, copy_plots, draw, ranking, read, table, verdicts
from benchmarks.exchange.workloads import WORKLOADS
from shoal.bench.report import Result, Threshold
from shoal.bench.suites import BenchSettings, Suite
from shoal.errors import ShoalError

HOSTS, SEEDS = 4, 3
FINALISTS = 2  # of the first seed, because the best of one seed may be lucky
FAST, SLOW = "1gbit", "100mbit"
STEPS = {"mlp": 52, "gpt": 44}
SLOW_STEPS, QUICK_STEPS, COUNT_STEPS = 4, 12, 2
SLOW_SECONDS = 40.0  # enough for a strategy that is ten times as fast as DDP
MODELS = ("mlp", "gpt")
SCHEDULE_WORKLOADS = ("deep mlp, on a device", "small gpt, on a device")
COUNTED = "mlp, narrow"
MINUTES = "<= 25"
BUDGET_SECONDS = 24.8 * 60  # further seeds that would end later are left out
QUICK = (contenders.EXACT, contenders.OUR_POWERSGD, contenders.OFTENER)


class TimeBudget:
    """How long the suite has run, and what still fits."""

    def __init__(self, seconds: float = BUDGET_SECONDS) -> None:
        self._begin, self._seconds = time.monotonic(), seconds

    def fits(self, seconds: float) -> bool:
        """Return whether something that takes so long ends in time."""
        return self.elapsed() + seconds < self._seconds

    def elapsed(self) -> float:
        """Return the seconds since this object was made."""
        return time.monotonic() - self._begin


ModelResults = dict[str, list[Results]]
"""Results at the fast rate: by model, one entry for each seed."""
Part = Callable[[], Iterable[Result]]


def run(settings: BenchSettings) -> Iterator[Result]:
    """Yield every result of the suite; without root, raise an error that says what is needed."""
    from shoal.testbed import Testbed

    budget, measured = TimeBudget(), ModelResults()
    with Testbed(HOSTS, FAST) as bed:
        for case, part in parts(bed, settings, measured):
            yield from guarded(case, part)
        bed.limit(FAST)
        if not settings.quick:
            part = partial(further_seeds, bed, settings, budget, measured)
            yield from guarded("further seeds", part)
    for model, seeds in measured.items():
        case = f"{model}, {FAST}, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
        yield from guarded(case, partial(final_verdicts, case, seeds, quick=settings.quick))
    minutes = budget.elapsed() / 60
    if not settings.quick:
        met = Threshold.parse(MINUTES).met(minutes)
        yield Result("the whole suite", "minutes", minutes, "min", threshold=MINUTES, passes=met)


def parts(
    bed: Cluster, settings: BenchSettings, measured: ModelResults
) -> Iterator[tuple[str, Part]]:
    """Yield name and measurement of each part but further seeds, in order."""
    models = MODELS[:1] if settings.quick else MODELS
    for model in models:
        yield f"{model}, {FAST}", partial(fast, bed, model, settings, measured)
    if settings.quick:
        yield "compressors", partial(costs, settings)
        return
    for model in models:
        yield f"{model}, {SLOW}", partial(slow, bed, model, settings, measured)
    for workload in SCHEDULE_WORKLOADS:
        yield f"{workload}, {FAST}", partial(schedule_times, bed, workload, settings)
    yield "mlp, narrow", partial(replanning, bed, settings)
    yield f"{COUNTED}, {FAST}, bytes", partial(bytes_sent, bed, settings)
    yield "compressors", partial(costs, settings)


def guarded(case: str, part: Part) -> Iterator[Result]:
    """Yield the rows of a part; if it fails, a row that says why, so that no other part is lost."""
    try:
        yield from part()
    except Exception as error:  # any: half an hour of measurements would be lost
        lines = str(error).strip().splitlines() or [type(error).__name__]
        yield not_measured(f"{case}: {type(error).__name__}: {lines[-1]}")


def not_measured(why: str) -> Result:
    """Return the failing row of something that could not be measured."""
    return Result(why, "measured", 0, "", threshold=">= 1", passes=False)


def fast(
    cluster: Cluster, model: str, settings: BenchSettings, measured: ModelResults
) -> Iterator[Result]:
    """Yield time to loss where DDP can run to the end; add the results to ``measured``."""
    cluster.limit(FAST)
    names: tuple[str, ...] = (
        QUICK if settings.quick else (*contenders.STRATEGIES, contenders.POWERSGD)
    )
    results = run_seed(cluster, model, settings, settings.seed, names)
    measured[model] = [results]
    case = f"{model}, {FAST}"
    yield from table(case, results)
    sent = [
        Sent(run.contender, run.nbytes, run.device_nbytes)
        for run in results.runs.values()
        if run.contender not in contenders.COUNTED  # these have a part of their own
    ]
    yield from sent_rows(case, sent, shapes(model), HOSTS)
    draw(case, results)
    for name in names:
        if name not in results.runs:
            yield not_measured(f"{case}: {name}: a worker failed before its end")


def final_verdicts(case: str, seeds: Sequence[Results], *, quick: bool) -> Iterator[Result]:
    """Yield the verdicts over all seeds.

    A quick run has no thresholds: in its few steps a single exchange weighs too much.
    """
    for row in verdicts(case, seeds, slow=False):
        yield replace(row, threshold=None, passes=None) if quick else row


def further_seeds(
    cluster: Cluster, settings: BenchSettings, budget: TimeBudget, measured: ModelResults
) -> Iterator[Result]:
    """Run the winners with other seeds, as long as there is time; yield the number of seeds."""
    expected = dict.fromkeys(measured, 120.0)  # seconds of the next seed
    for seed in range(settings.seed + 1, settings.seed + SEEDS):
        for model, seeds in measured.items():
            if not budget.fits(expected[model]):
                continue
            begin, first = budget.elapsed(), seeds[:1]
            winners = ranking(first, every_step=False)[:FINALISTS]
            winners += ranking(first, every_step=True)[:1]
            peers = (contenders.OUR_POWERSGD, contenders.POWERSGD)
            names = tuple(dict.fromkeys((*winners, *peers)))
            seeds.append(run_seed(cluster, model, settings, seed, names))
            expected[model] = budget.elapsed() - begin
    for model, seeds in measured.items():
        complete, case = len(seeds) >= SEEDS, f"{model}, {FAST}"
        if not complete:
            case += f": {SEEDS - len(seeds)} seeds left out for lack of time"
        yield Result(case, "seeds", len(seeds), "", threshold=f">= {SEEDS}", passes=complete)


def run_seed(
    cluster: Cluster, model: str, settings: BenchSettings, seed: int, names: tuple[str, ...]
) -> Results:
    """Train all contenders with one seed; if a worker fails, return those that had ended."""
    steps = QUICK_STEPS if settings.quick else STEPS[model]
    job = {"workload": model, "seed": seed, "contenders": names, "steps": steps}
    try:
        return read(_run_job(cluster, job, settings, f"{model}, {FAST}, seed {seed}"), steps)
    except JobFailed as error:
        ended = [each.get("contender") for each in error.messages]
        if contenders.DDP not in ended or len(ended) < 3:
            raise
        return read(error.messages, steps)


def slow(
    cluster: Cluster, model: str, settings: BenchSettings, measured: ModelResults
) -> Iterator[Result]:
    """Yield the time to the same loss where a step of DDP takes seconds."""
    if model not in measured:
        raise ShoalError(f"the loss that DDP reaches at {FAST} is not known")
    job = {
        "workload": model,
        "seed": settings.seed,
        "contenders": contenders.SLOW_STRATEGIES,
        "steps": SLOW_STEPS,
        "target": measured[model][0].runs[contenders.DDP].curve[-1][2],
        "most_seconds": SLOW_SECONDS,
        "most_steps": 3 * STEPS[model] / SLOW_STEPS,
        "rates": (FAST, SLOW),
    }
    case = f"{model}, {SLOW}"
    cluster.limit(FAST)
    results = read(_run_job(cluster, job, settings, case), STEPS[model])
    yield from table(case, results)
    yield from verdicts(case, [results], slow=True)
    draw(case, results)


def schedule_times(cluster: Cluster, workload: str, settings: BenchSettings) -> Iterator[Result]:
    """Yield step times of lossless schedules."""
    cluster.limit(FAST)
    plan = schedules.ScheduleComparison(workload, contenders.SCHEDULES, seed=settings.seed)
    case = f"{workload}, {FAST}"
    messages = _run_job(cluster, {"kind": "schedules", **asdict(plan)}, settings, case)
    yield from schedules.judge(case, messages[-1])


def replanning(cluster: Cluster, settings: BenchSettings) -> Iterator[Result]:
    """Yield the steps after which an adaptive schedule notices links ten times as slow."""
    cluster.limit(FAST)
    plan = link_change.LinkChange(SLOW, seed=settings.seed)
    case = f"{plan.workload}, {FAST} cut to {SLOW}"
    messages = _run_job(cluster, {"kind": "link_change", **asdict(plan)}, settings, case)
    yield from link_change.judge(case, messages[-1])


def bytes_sent(cluster: Cluster, settings: BenchSettings) -> Iterator[Result]:
    """Yield the bytes of techniques whose time to loss is not measured."""
    cluster.limit(FAST)
    case = f"{COUNTED}, {FAST}"
    job = {
        "kind": "count",
        "workload": COUNTED,
        "seed": settings.seed,
        "contenders": contenders.COUNTED,
        "steps": COUNT_STEPS,
    }
    messages = _run_job(cluster, job, settings, f"{case}, bytes")
    sent = [Sent(each["counted"], each["nbytes"], each["device_nbytes"]) for each in messages]
    yield from sent_rows(case, sent, shapes(COUNTED), HOSTS)


def _run_job(
    cluster: Cluster, job: dict[str, Any], settings: BenchSettings, case: str
) -> list[dict[str, Any]]:
    names = [contenders.DDP, *job.get("contenders", ())]

    def report(doing: str) -> None:
        done = names.index(doing) if doing in names else 0
        settings.progress(f"{case}: {doing}", done, len(names))

    report("starting")
    return run_job(cluster, job, report)


def shapes(model: str) -> Sequence[tuple[int, ...]]:
    """Return the shapes of a workload's parameters."""
    return [tuple(p.shape) for p in WORKLOADS[model].model().parameters()]


SUITE = Suite(
    "exchange",
    "what compression, schedules and local steps save on a slow network",
    run,
    copy_plots,
    seeds=SEEDS,
)
