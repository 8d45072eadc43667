"""From curves to verdicts. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from shoal.bench.exchange.contenders import DDP, EXACT, OUR_POWERSGD, POWERSGD, period
from shoal.bench.form import Bar, Result

SMOOTH_STEPS = 8.0
ROUNDING = 1.002  # who sums in another order ends a little beside the same loss


class Smooth:
    """A mean that forgets by training step, of a curve that is straight between looks at it.

    It lags behind by the same number of steps however often one looks.

    >>> seldom, often = Smooth(), Smooth()
    >>> [round(often(step, 100.0 - step), 6) for step in range(0, 65, 4)][-1]
    43.997316
    >>> seldom(0, 100.0), round(seldom(64, 36.0), 6)
    (100.0, 43.997316)
    """

    def __init__(self, steps: float = SMOOTH_STEPS) -> None:
        self._steps, self._step, self._seen, self._mean = steps, 0, math.nan, math.nan

    def __call__(self, step: int, value: float) -> float:
        """The mean after a look at this step."""
        if math.isnan(self._mean):
            self._mean = value
        else:
            behind = (value - self._seen) / (step - self._step) * self._steps
            keep = math.exp((self._step - step) / self._steps)
            self._mean = value - behind + (self._mean - self._seen + behind) * keep
        self._step, self._seen = step, value
        return self._mean


def reaches(loss: float, target: float) -> bool:
    """Whether a loss is the target's, but for rounding."""
    return loss <= target * ROUNDING


@dataclass(frozen=True)
class Run:
    """One contender in one seed: points of (steps, seconds, loss), smoothed and held out.

    ``nbytes`` are those that a worker sent in a step, at its sockets and at its device.
    """

    contender: str
    curve: tuple[tuple[int, float, float], ...]
    target: float
    reached: bool
    nbytes: float = 0.0
    device_nbytes: float = 0.0

    @property
    def steps(self) -> int:
        """How many it trained."""
        return self.curve[-1][0]

    @property
    def seconds(self) -> float:
        """Of training, to the target or to where it was stopped."""
        return self.curve[-1][1]

    @property
    def step_seconds(self) -> float:
        """Of a usual step: the median over spans."""
        ends = zip(self.curve, self.curve[1:], strict=False)
        return median((b[1] - a[1]) / (b[0] - a[0]) for a, b in ends)


@dataclass(frozen=True)
class Field:
    """All runs of one model at one rate and seed.

    Attributes:
        runs: by contender; DDP's is the one the others are held against.
        null_seconds: of a step without exchange.
        ddp_steps: that DDP needs to the target; more than it ran where the rest was extrapolated.
        data: what was trained on.
    """

    runs: Mapping[str, Run]
    null_seconds: float
    ddp_steps: int
    data: str = "data"

    @property
    def ddp_seconds(self) -> float:
        """Of DDP to the target."""
        ran = self.runs[DDP]
        return ran.seconds + (self.ddp_steps - ran.steps) * ran.step_seconds

    def ratio(self, name: str, peer: str = DDP) -> float:
        """Seconds to the target, of one against another; infinite if it was not reached."""
        run = self.runs.get(name)
        if run is None or not run.reached:
            return math.inf
        if peer == DDP:
            return run.seconds / self.ddp_seconds
        other = self.runs.get(peer)
        return run.seconds / other.seconds if other is not None else math.inf

    @property
    def communication(self) -> float:
        """Share of DDP's step that goes to communication."""
        return 1 - self.null_seconds / self.runs[DDP].step_seconds

    def over_free(self, name: str) -> float:
        """Against as many steps as exact needs, each without exchange.

        Where exact did not run these are DDP's: both compute the same sums.
        """
        exact = self.runs.get(EXACT)
        steps = exact.steps if exact is not None and exact.reached else self.ddp_steps
        run = self.runs.get(name)
        if run is None or not run.reached:
            return math.inf
        return run.seconds / (steps * self.null_seconds)


def read(found: Sequence[Mapping[str, Any]], ddp_steps: int) -> Field:
    """From what rank 0 told."""
    *_, last = (each for each in found if "null_seconds" in each)
    runs = [_run(each) for each in found if "contender" in each]
    by_name = {run.contender: run for run in runs}
    return Field(by_name, last["null_seconds"], ddp_steps, last["data"])


def _run(told: Mapping[str, Any]) -> Run:
    curve = tuple((steps, seconds, loss) for steps, seconds, loss in told["curve"])
    sent = told["nbytes"], told["device_nbytes"]
    return Run(told["contender"], curve, told["target"], told["reached"], *sent)


def ours(field: Field) -> list[str]:
    """Strategies of Shoal in a field."""
    return [name for name in field.runs if name not in (DDP, POWERSGD)]


def ranking(fields: Sequence[Field], *, every_step: bool) -> list[str]:
    """Strategies that ran with every seed, by the median of their ratios to DDP, the best first.

    With an exchange every step, or any.
    """
    everywhere = [name for name in ours(fields[0]) if all(name in f.runs for f in fields)]
    names = [name for name in everywhere if not every_step or period(name) == 1]
    return sorted(names, key=lambda name: median(field.ratio(name) for field in fields))


def table(case: str, field: Field) -> Iterable[Result]:
    """One row a contender: seconds to DDP's loss."""
    yield Result(f"{case}, on {field.data}", "steps of DDP", field.ddp_steps, "")
    yield Result(f"{case}: {DDP}", "time to DDP's loss", field.ddp_seconds, "s")
    for name in [name for name in field.runs if name != DDP]:
        run = field.runs[name]
        if run.reached:
            ratio = field.ratio(name)
            yield Result(f"{case}: {name}", "time to DDP's loss", run.seconds, "s", DDP, ratio)
        else:
            yield Result(f"{case}: {name}", "time without reaching it", run.seconds, "s")


def barred(case: str, metric: str, ratios: Sequence[float], bar: str, against: str) -> Result:
    """The median of the seeds' ratios, and whether it keeps the bar.

    Which strategy it was stands in ``case``. A target not reached counts as ten thousand times as
    long: the form holds finite numbers only.
    """
    value = min(median(ratios), 1e4)
    return Result(case, metric, value, "", against, value, None, bar, Bar.parse(bar).met(value))


def verdicts(case: str, fields: Sequence[Field], *, slow: bool) -> Iterable[Result]:
    """The bars of one model at one rate; the best is who has the best median over the seeds."""
    first, metric = fields[0], "time ratio"
    winner = ranking(fields, every_step=False)[0]
    ratios = [field.ratio(winner) for field in fields]
    if slow:
        yield barred(f"{case}: best, {winner}", metric, ratios, "<= 0.1", DDP)
        return
    share = median(field.communication for field in fields)
    yield Result(
        f"{case}: {DDP}", "share of communication", share, "", bar=">= 0.75", holds=share >= 0.75
    )
    steady = ranking(fields, every_step=True)[0]
    yield barred(
        f"{case}: best every step, {steady}", metric, [f.ratio(steady) for f in fields],
        "<= 0.5", DDP,
    )  # fmt: skip
    yield barred(f"{case}: best, {winner}", metric, ratios, "<= 0.3333", DDP)
    if POWERSGD in first.runs:  # not in a quick run
        powers = [field.ratio(OUR_POWERSGD, POWERSGD) for field in fields]
        yield barred(f"{case}: {OUR_POWERSGD}", metric, powers, "<= 0.6667", POWERSGD)
    free = [field.over_free(winner) for field in fields]
    yield barred(f"{case}: best, {winner}", metric, free, "<= 1.5", "free communication")
