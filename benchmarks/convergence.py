"""Suite ``convergence``: what compression, local steps and gossip cost in accuracy.

Eight workers in lockstep train a small MLP on Fashion-MNIST for one pass over the data, three
seeds. All have the same batches, first weights and number of steps; what is reported is how much
of the held-out pictures the agreed model then tells right, in percent, and how that rose.

The learning rate is the best for ``exact`` of 0.1, 0.2, 0.3 and 0.5, and falls to zero in a
straight line. Two contenders need a rate of their own: ``sign``, whose steps have no length, and
``dgc``, whose momentum makes every gradient count ten times.

Bars, on means over the seeds: error feedback brings top-k of 1 % to within a point of exact, top-k
without it stays more than a point below, and exact >= error feedback > without. The first part of
that order is a tie where it works, so that bar is widened by the noise between the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import torch

from shoal.bench.form import Bar, Interval, Result
from shoal.bench.plot import write_plot
from shoal.bench.pupils import Curve, Task, task, train
from shoal.bench.suites import Settings, Suite

SEEDS = 3
RATE = 0.3
PLOTS = Path("shoal-runs")
EXACT, TOPK, FED = "exact", "topk(0.01)", "error_feedback(topk(0.01))"
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # seeds -> 97.5 % quantile of Student's t


@dataclass(frozen=True)
class Contender:
    """A strategy, and the learning rate it is trained with.

    Attributes:
        name: its one answer that is not the plainest, as one types it.
        rate: learning rate of the first step.
    """

    name: str
    rate: float = RATE

    @property
    def case(self) -> str:
        """For the report, with the rate where it is its own."""
        return self.name if self.rate == RATE else f"{self.name}, rate {self.rate:g}"


CONTENDERS = (
    Contender(EXACT),
    Contender("cast(bfloat16)"),
    Contender("int8"),
    Contender("qsgd(16)"),
    Contender("qsgd(1)"),
    Contender("terngrad"),
    Contender("onebit"),
    Contender("sign", rate=0.003),
    Contender(FED),
    Contender(TOPK),
    Contender("dgc(0.01)", rate=0.03),
    Contender("error_feedback(powersgd(2))"),
    Contender("local(8)"),
    Contender("gossip(ring)"),
)
Curves = Mapping[Contender, Sequence[Curve]]
"""Of each contender a curve for each seed."""


def run(settings: Settings) -> Iterator[Result]:
    """Train every contender with every seed, then judge; a quick run has one seed and the bars."""
    chosen = [c for c in CONTENDERS if not settings.quick or c.name in (EXACT, FED, TOPK)]
    seeds = settings.seeds(SEEDS)
    with one_thread():
        on = task()
        curves = trained(on, chosen, seeds, settings)
    yield from rows(curves, seeds, on.data.source)
    draw(curves, on)


SUITE = Suite(
    "convergence", "what compression, local steps and gossip cost in accuracy", run, seeds=SEEDS
)


def trained(
    on: Task, chosen: Sequence[Contender], seeds: Sequence[int], settings: Settings
) -> Curves:
    """Every contender's curves."""
    curves: dict[Contender, list[Curve]] = {contender: [] for contender in chosen}
    total = len(chosen) * len(seeds)
    for done in range(total):
        seed, contender = seeds[done // len(chosen)], chosen[done % len(chosen)]
        settings.progress(f"{contender.name}, seed {seed}", done, total)
        strategy = f"{contender.name}, fifo"
        curves[contender].append(train(on, strategy, rate=contender.rate, seed=seed))
    return curves


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors this small are only slowed down by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rows(curves: Curves, seeds: Sequence[int], source: str) -> Iterator[Result]:
    """Means, then what each loses against exact, then the order, then every seed."""
    ends = {c.name: [curve[-1][1] for curve in each] for c, each in curves.items()}
    for contender in curves:
        values = ends[contender.name]
        title = f"held-out accuracy, {source}, mean of {len(seeds)} seeds"
        yield Result(contender.case, title, mean(values), "%", interval=student(values))
    for contender in curves:
        if contender.name != EXACT:
            yield lost(contender, ends)
    yield from order(ends)
    for index, seed in enumerate(seeds):
        for contender in curves:
            value = ends[contender.name][index]
            yield Result(contender.case, f"held-out accuracy, seed {seed}", value, "%")


def lost(contender: Contender, ends: Mapping[str, Sequence[float]]) -> Result:
    """Points below exact, of the same seeds; judged where the issue sets a bar."""
    apart = differences(ends[EXACT], ends[contender.name])
    bar = {FED: "<= 1", TOPK: "> 1"}.get(contender.name)
    value = mean(apart)
    # Within a point means on either side of it.
    holds = Bar.parse(bar).met(abs(value) if contender.name == FED else value) if bar else None
    interval = student(apart)
    return Result(contender.case, "points below exact", value, "", None, None, interval, bar, holds)


def order(ends: Mapping[str, Sequence[float]]) -> Iterator[Result]:
    """Exact >= error feedback > top-k alone; one seed cannot tell the first from a tie."""
    apart = differences(ends[EXACT], ends[FED])
    noise, bar = student(apart), ">= 0" if len(apart) > 1 else None
    holds = Bar.parse(bar).met(mean(apart), slack=noise.half_width) if bar and noise else None
    case = f"{EXACT} less {FED}"
    yield Result(case, "order, points", mean(apart), "", None, None, noise, bar, holds)
    apart = differences(ends[FED], ends[TOPK])
    noise, bar = student(apart), "> 0"
    case, holds = f"{FED} less {TOPK}", Bar.parse(bar).met(mean(apart))
    yield Result(case, "order, points", mean(apart), "", None, None, noise, bar, holds)


def differences(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Seed by seed."""
    return [a - b for a, b in zip(one, other, strict=True)]


def student(values: Sequence[float]) -> Interval | None:
    """95 % confidence interval of the mean of few numbers; None of a single one."""
    if len(values) < 2:
        return None
    half = _STUDENT[len(values)] * stdev(values) / math.sqrt(len(values))
    return Interval(mean(values) - half, mean(values) + half)


def draw(curves: Curves, on: Task) -> Path:
    """Errors against steps of all, the mean of the seeds, as a picture under ``shoal-runs``."""
    PLOTS.mkdir(exist_ok=True)
    path = PLOTS / "convergence.svg"
    least = 50 / len(on.data.held_out[1])  # half a picture: axes are logarithmic
    series = {
        contender.case: [
            (step, max(least, 100 - mean(curve[at][1] for curve in each)))
            for at, (step, _) in enumerate(each[0])
        ]
        for contender, each in curves.items()
    }
    title = f"{on.data.source}, {on.workers} workers: held-out error against steps"
    write_plot(path, title, "steps", "held-out error, percent", series)
    return path
