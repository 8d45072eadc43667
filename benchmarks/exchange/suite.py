"""Suite ``exchange``: does sending less, earlier or more seldom pay on a slow network?

Four hosts of one worker each (see :mod:`shoal.testbed`; root, Linux).

1. Time to loss, at 1 Gbit/s and at 100 Mbit/s: seconds of training until the held-out loss that DDP
   reaches in a fixed number of steps, by every strategy.
2. Lossless schedules against DDP's buckets, by step time; how soon an adaptive one notices that the
   links were cut to a tenth.
3. Bytes that left the sockets, against each technique's formula.
4. Encoding and decoding, for every compressor of the catalogue.
5. Time to loss with two more seeds: DDP, torch's PowerSGD hook, our powersgd, the two best of the
   first and the best with an exchange every step. They come last, for they give way when time is
   short; the rows say so.

At 100 Mbit/s a step of DDP takes five seconds, so DDP runs only a few there, and its time to the
loss is that of all its steps at the median of those; the loss itself is that of the run at 1 Gbit/s
with the same seed, since how fast the network is changes nothing in what DDP computes. Contenders
get ready, which sends the whole model, before the links are slowed down.

A part that fails is a row that says why, and the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from shoal.bench.exchange import contenders as named
from shoal.bench.exchange import cut, duel
from shoal.bench.exchange.codec import costs
from shoal.bench.exchange.curves import draw, gather
from shoal.bench.exchange.formulas import Sent, counted
from shoal.bench.exchange.judge import Field, ranking, read, table, verdicts
from shoal.bench.exchange.places import Place, WorkersFailed, work
from shoal.bench.exchange.tasks import WORKLOADS
from shoal.bench.form import Bar, Result
from shoal.bench.suites import Settings, Suite
from shoal.errors import ShoalError

HOSTS, SEEDS = 4, 3
FINALISTS = 2  # of the first seed: who is lucky once is not the best
FAST, SLOW = "1gbit", "100mbit"
STEPS = {"mlp": 52, "gpt": 44}
SLOW_STEPS, QUICK_STEPS, COUNT_STEPS = 4, 12, 2
SLOW_SECONDS = 40.0  # who is ten times as fast as DDP needs less
MODELS = ("mlp", "gpt")
DUELS = (("deep mlp, on a device", FAST), ("small gpt, on a device", FAST))
COUNTED = "mlp, narrow"
MINUTES = "<= 25"
BUDGET_SECONDS = 24.8 * 60  # further seeds that would end later are left out
QUICK = (named.EXACT, named.OUR_POWERSGD, named.OFTENER)


class Clock:
    """How long the suite has run, and what still fits."""

    def __init__(self, seconds: float = BUDGET_SECONDS) -> None:
        self._begin, self._seconds = time.monotonic(), seconds

    def fits(self, seconds: float) -> bool:
        """Whether something that takes so long ends in time."""
        return self.now() + seconds < self._seconds

    def now(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._begin


Fields = dict[str, list[Field]]
"""What was measured at the fast rate: by model, a field a seed."""


def run(settings: Settings) -> Iterator[Result]:
    """Every measurement of the suite; without root it says at once what it needs."""
    from shoal.testbed import Testbed

    clock, fields = Clock(), Fields()
    with Testbed(HOSTS, FAST) as bed:
        for case, part in parts(bed, settings, fields):
            yield from guarded(case, part)
        bed.limit(FAST)
        if not settings.quick:
            yield from guarded("further seeds", partial(seeds, bed, settings, (clock, fields)))
    for model, found in fields.items():
        case = f"{model}, {FAST}, {len(found)} seed{'s' if len(found) > 1 else ''}"
        yield from guarded(case, partial(standing, case, found, quick=settings.quick))
    minutes = clock.now() / 60
    if not settings.quick:
        met = Bar.parse(MINUTES).met(minutes)
        yield Result("the whole suite", "minutes", minutes, "min", bar=MINUTES, holds=met)


Part = Callable[[], Iterable[Result]]


def parts(bed: Place, settings: Settings, fields: Fields) -> Iterator[tuple[str, Part]]:
    """What is measured but for further seeds, in order, each by name."""
    models = MODELS[:1] if settings.quick else MODELS
    for model in models:
        yield f"{model}, {FAST}", partial(fast, bed, model, settings, fields)
    if settings.quick:
        yield "compressors", partial(costs, settings)
        return
    for model in models:
        yield f"{model}, {SLOW}", partial(slow, bed, model, settings, fields)
    for workload, rate in DUELS:
        yield f"{workload}, {rate}", partial(schedules, bed, workload, rate, settings)
    yield "mlp, narrow", partial(redecides, bed, settings)
    yield f"{COUNTED}, {FAST}, bytes", partial(bytes_sent, bed, settings)
    yield "compressors", partial(costs, settings)


def guarded(case: str, part: Part) -> Iterator[Result]:
    """The rows of a part; if it fails, a row that says why, so that the others are not lost."""
    try:
        yield from part()
    except Exception as error:  # whatever it is: half an hour of measurements hangs on it
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = f"{case}: {type(error).__name__}: {lines[-1]}"
        yield Result(why, "measured", 0, "", bar=">= 1", holds=False)


def fast(place: Place, model: str, settings: Settings, fields: Fields) -> Iterator[Result]:
    """Time to loss where DDP can be run to the end; what was measured goes into ``fields``."""
    place.limit(FAST)
    tried: tuple[str, ...] = QUICK if settings.quick else (*named.STRATEGIES, named.POWERSGD)
    field = race(place, model, settings, (settings.seed, tried))
    fields[model] = [field]
    case = f"{model}, {FAST}"
    yield from table(case, field)
    sent = [
        Sent(run.contender, run.nbytes, run.device_nbytes)
        for run in field.runs.values()
        if run.contender not in named.COUNTED  # these have a part of their own
    ]
    yield from counted(case, sent, shapes(model), HOSTS)
    draw(case, field)
    yield from lost(case, tried, field)


def standing(case: str, fields: Sequence[Field], *, quick: bool) -> Iterator[Result]:
    """The verdicts over all seeds; in the few steps of a quick run one exchange weighs too much."""
    for row in verdicts(case, fields, slow=False):
        yield replace(row, bar=None, holds=None) if quick else row


def lost(case: str, tried: Sequence[str], field: Field) -> Iterator[Result]:
    """A row for each contender of which nothing is known, for a worker had failed by then."""
    for name in tried:
        if name not in field.runs:
            why = f"{case}: {name}: a worker failed before its end"
            yield Result(why, "measured", 0, "", bar=">= 1", holds=False)


def seeds(place: Place, settings: Settings, kept: tuple[Clock, Fields]) -> Iterator[Result]:
    """The winners again with other seeds, for as long as there is time; how many there were."""
    clock, fields = kept
    took = dict.fromkeys(fields, 120.0)
    for seed in range(settings.seed + 1, settings.seed + SEEDS):
        for model, known in fields.items():
            if not clock.fits(took[model]):
                continue
            begin, first = clock.now(), known[:1]
            winners = ranking(first, every_step=False)[:FINALISTS]
            winners += ranking(first, every_step=True)[:1]
            tried = tuple(dict.fromkeys((*winners, named.OUR_POWERSGD, named.POWERSGD)))
            known.append(race(place, model, settings, (seed, tried)))
            took[model] = clock.now() - begin
    bar = f">= {SEEDS}"
    for model, known in fields.items():
        held, case = len(known) >= SEEDS, f"{model}, {FAST}"
        if not held:
            case += f": {SEEDS - len(known)} seeds left out for lack of time"
        yield Result(case, "seeds", len(known), "", bar=bar, holds=held)


def race(place: Place, model: str, settings: Settings, entry: tuple[int, tuple[str, ...]]) -> Field:
    """All contenders of one seed; if a worker fails, those who were done by then."""
    seed, tried = entry
    steps = QUICK_STEPS if settings.quick else STEPS[model]
    job = {"workload": model, "seed": seed, "contenders": tried, "steps": steps}
    try:
        return read(_work(place, job, settings, f"{model}, {FAST}, seed {seed}"), steps)
    except WorkersFailed as error:
        told = [each.get("contender") for each in error.found]
        if named.DDP not in told or len(told) < 3:
            raise
        return read(error.found, steps)


def slow(place: Place, model: str, settings: Settings, fields: Fields) -> Iterator[Result]:
    """Time to the same loss where a step of DDP takes seconds."""
    if model not in fields:
        raise ShoalError(f"the loss that DDP reaches at {FAST} is not known")
    target = fields[model][0].runs[named.DDP].curve[-1][2]
    job = {
        "workload": model, "seed": settings.seed, "contenders": named.SLOW_STRATEGIES,
        "steps": SLOW_STEPS, "target": target, "most_seconds": SLOW_SECONDS,
        "most_steps": 3 * STEPS[model] / SLOW_STEPS, "rates": (FAST, SLOW),
    }  # fmt: skip
    case = f"{model}, {SLOW}"
    place.limit(FAST)
    field = read(_work(place, job, settings, case), STEPS[model])
    yield from table(case, field)
    yield from verdicts(case, [field], slow=True)
    draw(case, field)


def schedules(place: Place, workload: str, rate: str, settings: Settings) -> Iterator[Result]:
    """Step times of lossless schedules."""
    place.limit(rate)
    wanted = duel.Duel(workload, named.SCHEDULES, seed=settings.seed)
    case = f"{workload}, {rate}"
    found = _work(place, {"kind": "duel", **asdict(wanted)}, settings, case)
    yield from duel.judge(case, found[-1])


def redecides(place: Place, settings: Settings) -> Iterator[Result]:
    """Steps after which an adaptive schedule notices that links are ten times as slow."""
    place.limit(FAST)
    wanted = cut.Cut(SLOW, seed=settings.seed)
    case = f"{wanted.workload}, {FAST} cut to {SLOW}"
    found = _work(place, {"kind": "cut", **asdict(wanted)}, settings, case)
    yield from cut.judge(case, found[-1])


def bytes_sent(place: Place, settings: Settings) -> Iterator[Result]:
    """What techniques send that do not take part in the races."""
    place.limit(FAST)
    case = f"{COUNTED}, {FAST}"
    job = {
        "kind": "count", "workload": COUNTED, "seed": settings.seed, "contenders": named.COUNTED,
        "steps": COUNT_STEPS,
    }  # fmt: skip
    found = _work(place, job, settings, f"{case}, bytes")
    sent = [Sent(each["counted"], each["nbytes"], each["device_nbytes"]) for each in found]
    yield from counted(case, sent, shapes(COUNTED), HOSTS)


def _work(place: Place, job: dict[str, Any], settings: Settings, case: str) -> list[dict[str, Any]]:
    names = [named.DDP, *job.get("contenders", ())]

    def tell(doing: str) -> None:
        done = names.index(doing) if doing in names else 0
        settings.progress(f"{case}: {doing}", done, len(names))

    tell("starting")
    return work(place, job, tell)


def shapes(model: str) -> Sequence[tuple[int, ...]]:
    """Of a workload's parameters."""
    return [tuple(p.shape) for p in WORKLOADS[model].model().parameters()]


SUITE = Suite(
    "exchange",
    "what compression, schedules and local steps save on a slow network",
    run,
    gather,
    seeds=SEEDS,
)
