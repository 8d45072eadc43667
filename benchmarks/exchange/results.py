"""From training curves to rows, verdicts and plots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from shutil import copyfile
from statistics import median
from typing import Any

from benchmarks.exchange.contenders import DDP, EXACT, OUR_POWERSGD, POWERSGD, period
from shoal.bench.plot import Points, write_plot
from shoal.bench.report import Report, Result, Threshold

SMOOTH_STEPS = 8.0
ROUNDING = 1.002  # sums in another order end at a slightly different loss
PLOTS = Path("shoal-runs")
TARGET = "the loss to reach"


class Smooth:
    """Exponential moving average, by training step, of a curve taken as linear between its points.

    It lags behind by the same number of steps, however often the curve is measured.

    >>> seldom, often = Smooth(), Smooth()
    >>> [round(often(step, 100.0 - step), 6) for step in range(0, 65, 4)][-1]
    43.997316
    >>> seldom(0, 100.0), round(seldom(64, 36.0), 6)
    (100.0, 43.997316)
    """

    def __init__(self, steps: float = SMOOTH_STEPS) -> None:
        self._steps, self._step, self._value, self._mean = steps, 0, math.nan, math.nan

    def __call__(self, step: int, value: float) -> float:
        """Add a point, and return the average at this step."""
        if math.isnan(self._mean):
            self._mean = value
        else:
            lag = (value - self._value) / (step - self._step) * self._steps
            decay = math.exp((self._step - step) / self._steps)
            self._mean = value - lag + (self._mean - self._value + lag) * decay
        self._step, self._value = step, value
        return self._mean


def reaches(loss: float, target: float) -> bool:
    """Return whether a loss is at most the target, up to rounding."""
    return loss <= target * ROUNDING


@dataclass(frozen=True)
class TrainingRun:
    """One contender with one seed: points of (steps, seconds, smoothed held-out loss).

    ``nbytes`` and ``device_nbytes`` are what a worker sent in a step, counted at its sockets and at
    its network device.
    """

    contender: str
    curve: tuple[tuple[int, float, float], ...]
    target: float
    reached: bool
    nbytes: float = 0.0
    device_nbytes: float = 0.0

    @property
    def steps(self) -> int:
        """Number of steps it trained."""
        return self.curve[-1][0]

    @property
    def seconds(self) -> float:
        """Training time to the target, or to where it was stopped."""
        return self.curve[-1][1]

    @property
    def step_seconds(self) -> float:
        """Time of a step: the median over the spans between points."""
        spans = zip(self.curve, self.curve[1:], strict=False)
        return median((b[1] - a[1]) / (b[0] - a[0]) for a, b in spans)


@dataclass(frozen=True)
class Results:
    """All runs of one model at one rate and seed.

    Attributes:
        runs: by contender; the others are compared with DDP's.
        null_seconds: of a step without exchange.
        ddp_steps: that DDP needs to the target; more than it ran if its time is extrapolated.
        data: source of the training data.
    """

    runs: Mapping[str, TrainingRun]
    null_seconds: float
    ddp_steps: int
    data: str = "data"

    @property
    def ddp_seconds(self) -> float:
        """Time of DDP to the target."""
        ddp = self.runs[DDP]
        return ddp.seconds + (self.ddp_steps - ddp.steps) * ddp.step_seconds

    def ratio(self, name: str, peer: str = DDP) -> float:
        """Return the time to the target divided by a peer's; infinite if it was not reached."""
        run = self.runs.get(name)
        if run is None or not run.reached:
            return math.inf
        if peer == DDP:
            return run.seconds / self.ddp_seconds
        other = self.runs.get(peer)
        return run.seconds / other.seconds if other is not None else math.inf

    @property
    def communication(self) -> float:
        """Share of communication in DDP's step."""
        return 1 - self.null_seconds / self.runs[DDP].step_seconds

    def over_free(self, name: str) -> float:
        """Return the time to the target divided by that of exact with free communication.

        Where exact did not run, DDP's number of steps is used: both compute the same sums.
        """
        exact = self.runs.get(EXACT)
        steps = exact.steps if exact is not None and exact.reached else self.ddp_steps
        run = self.runs.get(name)
        if run is None or not run.reached:
            return math.inf
        return run.seconds / (steps * self.null_seconds)


def read(messages: Sequence[Mapping[str, Any]], ddp_steps: int) -> Results:
    """Return the results that rank 0 wrote."""
    *_, last = (each for each in messages if "null_seconds" in each)
    runs = [_run(each) for each in messages if "contender" in each]
    by_name = {run.contender: run for run in runs}
    return Results(by_name, last["null_seconds"], ddp_steps, last["data"])


def _run(message: Mapping[str, Any]) -> TrainingRun:
    curve = tuple((steps, seconds, loss) for steps, seconds, loss in message["curve"])
    sent = message["nbytes"], message["device_nbytes"]
    return TrainingRun(message["contender"], curve, message["target"], message["reached"], *sent)


def ranking(seeds: Sequence[Results], *, every_step: bool) -> list[str]:
    """Return the strategies that ran with every seed, by the median of their ratios to DDP.

    Args:
        seeds: results of each seed.
        every_step: only strategies that exchange in every step.
    """
    names = [
        name
        for name in seeds[0].runs
        if name not in (DDP, POWERSGD)
        and all(name in each.runs for each in seeds)
        and (not every_step or period(name) == 1)
    ]
    return sorted(names, key=lambda name: median(each.ratio(name) for each in seeds))


def table(case: str, results: Results) -> Iterable[Result]:
    """Yield one row for each contender: seconds to DDP's loss."""
    yield Result(f"{case}, on {results.data}", "steps of DDP", results.ddp_steps, "")
    yield Result(f"{case}: {DDP}", "time to DDP's loss", results.ddp_seconds, "s")
    for name in [name for name in results.runs if name != DDP]:
        run = results.runs[name]
        if run.reached:
            ratio = results.ratio(name)
            yield Result(f"{case}: {name}", "time to DDP's loss", run.seconds, "s", DDP, ratio)
        else:
            yield Result(f"{case}: {name}", "time without reaching it", run.seconds, "s")


def time_ratio(case: str, ratios: Sequence[float], threshold: str, against: str) -> Result:
    """Return the median of the seeds' ratios, and whether it meets the threshold.

    ``case`` names the strategy. A target that was not reached counts as a ratio of ten thousand,
    because a report has finite numbers only.
    """
    value = min(median(ratios), 1e4)
    passes = Threshold.parse(threshold).met(value)
    return Result(case, "time ratio", value, "", against, value, None, threshold, passes)


def verdicts(case: str, seeds: Sequence[Results], *, slow: bool) -> Iterable[Result]:
    """Yield the thresholds of one model at one rate; the best strategy is ``ranking``'s first."""
    winner = ranking(seeds, every_step=False)[0]
    ratios = [each.ratio(winner) for each in seeds]
    if slow:
        yield time_ratio(f"{case}: best, {winner}", ratios, "<= 0.1", DDP)
        return
    share, least = median(each.communication for each in seeds), Threshold.parse(">= 0.75")
    yield Result(
        f"{case}: {DDP}",
        "share of communication",
        share,
        "",
        threshold=str(least),
        passes=least.met(share),
    )
    steady = ranking(seeds, every_step=True)[0]
    steady_ratios = [each.ratio(steady) for each in seeds]
    yield time_ratio(f"{case}: best every step, {steady}", steady_ratios, "<= 0.5", DDP)
    yield time_ratio(f"{case}: best, {winner}", ratios, "<= 0.3333", DDP)
    if POWERSGD in seeds[0].runs:  # not in a quick run
        powers = [each.ratio(OUR_POWERSGD, POWERSGD) for each in seeds]
        yield time_ratio(f"{case}: {OUR_POWERSGD}", powers, "<= 0.6667", POWERSGD)
    free = [each.over_free(winner) for each in seeds]
    yield time_ratio(f"{case}: best, {winner}", free, "<= 1.5", "free communication")


def draw(case: str, results: Results) -> Path:
    """Plot loss against time of all contenders, the fastest first, under ``shoal-runs``.

    A report has no curves, so plots are written as soon as the runs have ended.
    """
    PLOTS.mkdir(exist_ok=True)
    path = PLOTS / ("exchange-" + case.replace(", ", "-").replace(" ", "-") + ".svg")
    series: dict[str, Points] = {}
    for run in sorted(results.runs.values(), key=_rank):
        series[label(run)] = [(seconds, loss) for _, seconds, loss in run.curve if seconds > 0]
    times = [seconds for points in series.values() for seconds, _ in points]
    target = results.runs[DDP].target
    series[TARGET] = [(min(times), target), (max(times), target)]
    title = f"{case}: held-out loss, smoothed, against time"
    write_plot(path, title, "seconds of training", "held-out loss", series)
    return path


def _rank(run: TrainingRun) -> tuple[bool, float, str]:
    reached = run.reached or run.contender == DDP  # which defines the target
    return not reached, run.seconds, run.contender


def label(run: TrainingRun) -> str:
    """Return a contender's name, without what all share, and its time."""
    name = run.contender.removeprefix("all_reduce, ")
    if run.contender == DDP:
        return name
    return f"{name}: {run.seconds:.3g} s" if run.reached else f"{name}: not reached"


def copy_plots(report: Report, folder: Path) -> Iterator[Path]:
    """Copy the plots of a report's runs into a folder."""
    begun = datetime.fromisoformat(report.header.date).timestamp()
    for path in sorted(PLOTS.glob("exchange-*.svg")):
        if path.stat().st_mtime >= begun:
            yield Path(copyfile(path, folder / path.name))
