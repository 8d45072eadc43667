"""Suite ``exchange``: does sending less, earlier or more seldom pay on a slow network?

Four hosts of one worker each (see :mod:`shoal.testbed`; root, Linux).

1. Time to loss, at 1 Gbit/s and at 100 Mbit/s: seconds of training until the held-out loss that DDP
   reaches in a fixed number of steps. The first seed tries every strategy; the others repeat DDP,
   torch's PowerSGD hook, our powersgd and the two winners of the first.
2. Bytes that a host's device counted, against each technique's formula.
3. Lossless schedules against DDP's buckets, by step time.
4. Encoding and decoding, for every compressor of the catalogue.

At 100 Mbit/s a step of DDP takes five seconds, so DDP runs only a few there, and its time to the
loss is that of all its steps at the median of those; the loss itself is that of the run at 1 Gbit/s
with the same seed, since how fast the network is changes nothing in what DDP computes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.bench.exchange import contenders as named
from shoal.bench.exchange.codec import costs
from shoal.bench.exchange.duel import Duel
from shoal.bench.exchange.duel import judge as judge_duel
from shoal.bench.exchange.formulas import counted
from shoal.bench.exchange.judge import Field, best, read, table, verdicts
from shoal.bench.exchange.places import Place, work
from shoal.bench.exchange.tasks import WORKLOADS
from shoal.bench.form import Result
from shoal.bench.plot import write_plot
from shoal.bench.suites import Settings, Suite

HOSTS, SEEDS = 4, 3
FAST, SLOW = "1gbit", "100mbit"
STEPS, SLOW_STEPS, QUICK_STEPS = 60, 8, 12
MODELS = ("mlp", "gpt")
DUELS = ("mlp, larger batch",)
BUDGET_SECONDS = 24 * 60  # the whole suite; further seeds and duels give way
QUICK = (named.EXACT, named.OUR_POWERSGD, "all_reduce, local(8), fifo, exact")
PLOTS = Path("shoal-runs")


class Clock:
    """How long the suite has run, and what still fits."""

    def __init__(self, seconds: float = BUDGET_SECONDS) -> None:
        self._begin, self._seconds = time.monotonic(), seconds

    def fits(self, seconds: float) -> bool:
        """Whether something that takes so long ends in time."""
        return time.monotonic() - self._begin + seconds < self._seconds

    def now(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._begin


def run(settings: Settings) -> Iterator[Result]:
    """Every measurement of the suite; without root it says at once what it needs."""
    from shoal.testbed import Testbed

    clock = Clock()
    with Testbed(HOSTS, FAST) as bed:
        for model in MODELS[:1] if settings.quick else MODELS:
            bed.limit(FAST)
            fields: list[Field] = []
            yield from fast(bed, model, settings, (clock, fields))
            if not settings.quick:
                bed.limit(SLOW)
                yield from slow(bed, model, settings, fields[0])
        bed.limit(FAST)
        for workload in () if settings.quick else DUELS:
            if clock.fits(150):
                yield from schedules(bed, workload, settings)
    yield from costs(settings)


def fast(
    place: Place, model: str, settings: Settings, kept: tuple[Clock, list[Field]]
) -> Iterator[Result]:
    """Time to loss where DDP can be run to the end; what was measured goes into ``kept``."""
    clock, fields = kept
    steps = QUICK_STEPS if settings.quick else STEPS
    tried: tuple[str, ...] = QUICK if settings.quick else (named.POWERSGD, *named.STRATEGIES)
    took = 0.0
    for seed in range(settings.seed, settings.seed + (1 if settings.quick else SEEDS)):
        if fields and not clock.fits(2 * took + 300):  # what comes after needs its time, too
            break
        begin = clock.now()
        job = {"workload": model, "seed": seed, "contenders": tried, "steps": steps}
        fields.append(read(_work(place, job, settings, f"{model}, {FAST}, seed {seed}"), steps))
        took = clock.now() - begin
        winners = [best(fields[0], every_step=every) for every in (True, False)]
        tried = tuple(dict.fromkeys((named.POWERSGD, named.OUR_POWERSGD, *winners)))
    case = f"{model}, {FAST}"
    yield from table(case, fields[0])
    yield from verdicts(f"{case}, {len(fields)} seeds", fields, slow=False)
    yield from counted(case, fields[0].runs.values(), shapes(model), HOSTS)
    draw(case, fields[0])


def slow(place: Place, model: str, settings: Settings, before: Field) -> Iterator[Result]:
    """Time to the same loss where a step of DDP takes seconds."""
    target = before.runs[named.DDP].curve[-1][2]
    job = {
        "workload": model, "seed": settings.seed, "contenders": named.SLOW_STRATEGIES,
        "steps": SLOW_STEPS, "target": target, "most_seconds": 60.0,
        "most_steps": 3 * STEPS / SLOW_STEPS,
    }  # fmt: skip
    case = f"{model}, {SLOW}"
    field = read(_work(place, job, settings, case), STEPS)
    yield from table(case, field)
    yield from verdicts(case, [field], slow=True)
    draw(case, field)


def schedules(place: Place, workload: str, settings: Settings) -> Iterator[Result]:
    """Step times of lossless schedules."""
    wanted = Duel(workload, named.SCHEDULES, seed=settings.seed)
    job = {"kind": "duel", **asdict(wanted)}
    found = _work(place, job, settings, f"{workload}, {FAST}")
    yield from judge_duel(f"{workload}, {FAST}", found[-1]["seconds"])


def _work(place: Place, job: dict[str, Any], settings: Settings, case: str) -> list[dict[str, Any]]:
    names = [named.DDP, *job["contenders"]]

    def tell(doing: str) -> None:
        done = names.index(doing) if doing in names else 0
        settings.progress(f"{case}: {doing}", done, len(names))

    tell("starting")
    return work(place, job, tell)


def shapes(model: str) -> Sequence[tuple[int, ...]]:
    """Of a workload's parameters."""
    return [tuple(p.shape) for p in WORKLOADS[model].model().parameters()]


def draw(case: str, field: Field) -> None:
    """Loss against time of all, as a picture under ``shoal-runs``."""
    PLOTS.mkdir(exist_ok=True)
    name = "exchange-" + case.replace(", ", "-").replace(" ", "-") + ".svg"
    series = {
        run.contender: [(seconds, loss) for _, seconds, loss in run.curve if seconds > 0]
        for run in field.runs.values()
    }
    title = f"{case}: held-out loss against time"
    write_plot(PLOTS / name, title, "seconds of training", "held-out loss", series)


SUITE = Suite("exchange", "what compression, schedules and local steps save on a slow network", run)
