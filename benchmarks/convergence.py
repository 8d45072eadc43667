"""Suite ``convergence``: what compression, local steps and gossip cost in accuracy.

Eight workers in lockstep train a small MLP on Fashion-MNIST for one pass over the data, with three
seeds. All contenders have the same batches, initial weights and number of steps. The result is the
accuracy of the workers' mean model on held-out images, in percent, at the end and over time.

The learning rate is the best for ``exact`` of 0.1, 0.2, 0.3 and 0.5, and decreases linearly to
zero. Two contenders need a rate of their own: ``sign``, whose steps have no length, and ``dgc``,
whose momentum makes every gradient count ten times.

Thresholds, on means over the seeds:

1. error feedback brings top-k of 1 % to within a point of exact;
2. top-k without it stays more than a point below exact;
3. exact >= error feedback > without. The first part is a tie where error feedback works, so that
   threshold is widened by the noise between the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import torch

from benchmarks.convergence_task import ConvergenceTask, Curve, default_task, train
from shoal.bench.plot import write_plot
from shoal.bench.report import Interval, Result, Threshold
from shoal.bench.suites import BenchSettings, Suite

SEEDS = 3
RATE = 0.3
PLOTS = Path("shoal-runs")
EXACT, TOPK, FEEDBACK = "exact", "topk(0.01)", "error_feedback(topk(0.01))"
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # seeds -> 97.5 % quantile of Student's t


@dataclass(frozen=True)
class Contender:
    """A strategy and its learning rate.

    Attributes:
        name: the one technique that is not the default, as one types it.
        rate: learning rate of the first step.
    """

    name: str
    rate: float = RATE

    @property
    def case(self) -> str:
        """Name for the report, with the rate where it is not the usual one."""
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
    Contender(FEEDBACK),
    Contender(TOPK),
    Contender("dgc(0.01)", rate=0.03),
    Contender("error_feedback(powersgd(2))"),
    Contender("local(8)"),
    Contender("gossip(ring)"),
)
Curves = Mapping[Contender, Sequence[Curve]]
"""A curve for each seed, by contender."""


def run(settings: BenchSettings) -> Iterator[Result]:
    """Train every contender with every seed, then yield the results.

    A quick run has one seed, and only the contenders with thresholds.
    """
    chosen = [c for c in CONTENDERS if not settings.quick or c.name in (EXACT, FEEDBACK, TOPK)]
    seeds = settings.seeds(SEEDS)
    with one_thread():
        task = default_task()
        curves = train_all(task, chosen, seeds, settings)
    yield from rows(curves, seeds, task.data.source)
    draw(curves, task)


SUITE = Suite(
    "convergence", "what compression, local steps and gossip cost in accuracy", run, seeds=SEEDS
)


def train_all(
    task: ConvergenceTask,
    chosen: Sequence[Contender],
    seeds: Sequence[int],
    settings: BenchSettings,
) -> Curves:
    """Return every contender's curves."""
    curves: dict[Contender, list[Curve]] = {contender: [] for contender in chosen}
    total = len(chosen) * len(seeds)
    for done in range(total):
        seed, contender = seeds[done // len(chosen)], chosen[done % len(chosen)]
        settings.progress(f"{contender.name}, seed {seed}", done, total)
        strategy = f"{contender.name}, fifo"
        curves[contender].append(train(task, strategy, rate=contender.rate, seed=seed))
    return curves


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, because more only slow down tensors this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rows(curves: Curves, seeds: Sequence[int], source: str) -> Iterator[Result]:
    """Yield means, then the loss against exact, then the order, then every seed."""
    ends = {c.name: [curve[-1][1] for curve in each] for c, each in curves.items()}
    for contender in curves:
        values = ends[contender.name]
        title = f"held-out accuracy, {source}, mean of {len(seeds)} seeds"
        yield Result(contender.case, title, mean(values), "%", interval=student(values))
    for contender in curves:
        if contender.name != EXACT:
            yield points_below_exact(contender, ends)
    yield from order(ends)
    for index, seed in enumerate(seeds):
        for contender in curves:
            value = ends[contender.name][index]
            yield Result(contender.case, f"held-out accuracy, seed {seed}", value, "%")


def points_below_exact(contender: Contender, ends: Mapping[str, Sequence[float]]) -> Result:
    """Return the percentage points below exact, of the same seeds, with its threshold if any."""
    points = differences(ends[EXACT], ends[contender.name])
    value, passes = mean(points), None
    threshold = {FEEDBACK: "<= 1", TOPK: "> 1"}.get(contender.name)
    if threshold is not None:
        # Within a point means on either side of exact.
        number = abs(value) if contender.name == FEEDBACK else value
        passes = Threshold.parse(threshold).met(number)
    return _points(contender.case, "points below exact", points, threshold, passes)


def order(ends: Mapping[str, Sequence[float]]) -> Iterator[Result]:
    """Yield exact >= error feedback > top-k alone; one seed cannot show the first of them."""
    points = differences(ends[EXACT], ends[FEEDBACK])
    noise, threshold = student(points), ">= 0" if len(points) > 1 else None
    passes = None
    if threshold is not None and noise is not None:
        passes = Threshold.parse(threshold).met(mean(points), slack=noise.half_width)
    yield _points(f"{EXACT} less {FEEDBACK}", "order, points", points, threshold, passes)
    points = differences(ends[FEEDBACK], ends[TOPK])
    passes = Threshold.parse("> 0").met(mean(points))
    yield _points(f"{FEEDBACK} less {TOPK}", "order, points", points, "> 0", passes)


def _points(
    case: str, metric: str, points: Sequence[float], threshold: str | None, passes: bool | None
) -> Result:
    interval = student(points)
    return Result(case, metric, mean(points), "", None, None, interval, threshold, passes)


def differences(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return the differences, seed by seed."""
    return [a - b for a, b in zip(one, other, strict=True)]


def student(values: Sequence[float]) -> Interval | None:
    """Return the 95 % confidence interval of the mean of a few numbers; None for a single one."""
    if len(values) < 2:
        return None
    half = _STUDENT[len(values)] * stdev(values) / math.sqrt(len(values))
    return Interval(mean(values) - half, mean(values) + half)


def draw(curves: Curves, task: ConvergenceTask) -> Path:
    """Plot the error of every contender over steps, the mean of the seeds, in ``shoal-runs``."""
    PLOTS.mkdir(exist_ok=True)
    path = PLOTS / "convergence.svg"
    least = 50 / len(task.data.held_out[1])  # half an image, because the axes are logarithmic
    series = {
        contender.case: [
            (step, max(least, 100 - mean(curve[at][1] for curve in each)))
            for at, (step, _) in enumerate(each[0])
        ]
        for contender, each in curves.items()
    }
    title = f"{task.data.source}, {task.workers} workers: held-out error against steps"
    write_plot(path, title, "steps", "held-out error, percent", series)
    return path
