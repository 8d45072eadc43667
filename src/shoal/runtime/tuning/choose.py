"""Which plan holds now: measured, tried, kept, until the link is another.

1. measure some steps under the first plan, and some with messages of quite another size, since both
   together tell what a message costs by itself and what its bytes do; a schedule that only changes
   the order of its messages never sends others;
2. ask the schedule for its contenders on these layers and this link, try each for some steps, and
   those that came close to the fastest once more;
3. keep the fastest; the most promising one unless another is clearly faster;
4. when messages take another time than they did, begin again with what was just seen.

Pure: the same numbers give the same choice on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.analysis.links import Link, fit
from shoal.axes.scheduling import Layer, Schedule, fused, wfbp
from shoal.runtime.tuning.measure import Measurements

STARTUP = 1e-4  # seconds, of a link of which one size of message is all that was seen
SPREAD = 2  # a line is trusted when the largest message is so many times the smallest
CHANGED = 2.0  # times as slow, or as fast, at two looks in a row, is another link
CLEARLY = 0.98  # of the promising one's step: less is faster for certain
CLOSE, FINALISTS = 1.1, 3  # times the fastest's step; how many of those are tried again


class Planned(NamedTuple):
    """What to send by: a schedule, and what it is to know of the layers and the link."""

    schedule: Schedule
    layers: dict[str, Layer]
    link: Link
    why: str


class Trial(NamedTuple):
    """A plan, and what a step took, one number for each time that it was tried."""

    planned: Planned
    steps: list[float]

    @property
    def mean(self) -> float:
        """Of the times."""
        return math.fsum(self.steps) / len(self.steps)


class ScheduleTuner:
    """What a schedule that measures does next.

    Args:
        schedule: the one that was asked for.
        layers: in forward order, nothing but their sizes known.
    """

    def __init__(self, schedule: Schedule, layers: Sequence[Layer]) -> None:
        self.schedule = schedule
        self.layers = list(layers)
        self.link: Link | None = None
        self._points: dict[int, float] = {}
        self._left: list[Schedule] = []
        self._tried: list[Trial] = []
        self._again: list[Trial] | None = None  # None: it is not known yet who came close
        self._trying: Trial | None = None
        self._surveyed = False
        self._usual: dict[int, float] | None = None
        self._odd = 0  # looks in a row at which messages took another time

    def look(self, seen: Measurements) -> Planned | None:
        """What to change to after these steps; None: go on as before."""
        if self.schedule.measures == "changes":
            layers = [
                layer._replace(change=seen.changes.get(layer.name, 0)) for layer in self.layers
            ]
            return self._planned(self.schedule, layers, "other updates are largest")
        if not seen.messages:
            return None
        if self._trying is not None:
            return self._judge(self._trying, seen)
        if self._usual is None and self.link is not None:
            self._usual = dict(seen.messages)
        slower = ratio(self._usual or {}, seen.messages)
        self._odd = 0 if 1 / CHANGED < slower < CHANGED else self._odd + 1
        if self.link is not None and self._odd < 2:
            return None
        if self.link is not None:
            self._points.clear()
            return self._begin(seen, f"messages take {slower:.2g}x")
        if not self._surveyed and not self.schedule.reorders:
            self._surveyed = True
            self._points.update(seen.messages)
            survey = unlike(next(iter(self._points)), self.layers)
            if survey is not None:
                return self._planned(survey, self.layers, "to measure messages of another size")
        return self._begin(seen, "measured")

    def _begin(self, seen: Measurements, why: str) -> Planned:
        self._learn(seen)
        link = self.link or Link(STARTUP, 0.0)
        offered = self.schedule.contenders
        self._left = list(offered(self.layers, link.cost) if offered else (self.schedule,))
        self._tried, self._again, self._usual, self._odd = [], None, None, 0
        return self._try(f"{why}; {told(link)}")

    def _try(self, why: str) -> Planned:
        self._trying = Trial(self._planned(self._left.pop(0), self.layers, why), [])
        self._tried.append(self._trying)
        return self._trying.planned

    def _judge(self, trial: Trial, seen: Measurements) -> Planned:
        """The steps of a trial are over: try the next, or keep the fastest."""
        trial.steps.append(seen.step)
        self._learn(seen)
        if self._left:
            return self._try("tried too")
        if self._again is None:
            self._again = close(self._tried)
        if self._again:
            self._trying = self._again.pop(0)
            return self._trying.planned._replace(why="tried again, for it is close to the fastest")
        self._trying = None
        best = decided(self._tried)
        steps = ", ".join(f"{t.planned.schedule} {1e3 * t.mean:.3g} ms" for t in self._tried)
        link = self.link or best.planned.link
        return best.planned._replace(why=f"kept of {steps} a step; {told(link)}")

    def _learn(self, seen: Measurements) -> None:
        self._points.update(seen.messages)
        self.link = link_of(self._points, self.link)
        self.layers = [
            # nobody times forward: it is one product where backward is two
            layer._replace(backward=taken, forward=taken / 2)
            for layer in self.layers
            for taken in [seen.backward.get(layer.name, layer.backward)]
        ]

    def _planned(self, schedule: Schedule, layers: list[Layer], why: str) -> Planned:
        link = self.link or Link(STARTUP, 1e-9)
        return Planned(schedule, {layer.name: layer for layer in layers}, link, why)


def decided(tried: Sequence[Trial]) -> Trial:
    """The fastest, or the first unless it is clearly slower; of those tried again, if any were.

    Times of the first trials and of the second are not compared with each other: the machines may
    have had other things to do meanwhile.
    """
    final = [trial for trial in tried if len(trial.steps) > 1] or list(tried)
    promising, fastest = final[0], min(final, key=lambda trial: trial.mean)
    clearly = promising is not tried[0] or fastest.mean < CLEARLY * promising.mean
    return fastest if clearly else promising


def close(tried: Sequence[Trial]) -> list[Trial]:
    """Whom the fastest does not beat for certain, and itself; nobody if that is the only one."""
    ordered = sorted(tried, key=lambda trial: trial.mean)[:FINALISTS]
    near = [trial for trial in ordered if trial.mean <= CLOSE * ordered[0].mean]
    return near if len(near) > 1 else []


def unlike(nbytes: int, layers: Sequence[Layer]) -> Schedule | None:
    """Messages of a size that tells more beside that one: every tensor alone, or all together.

    None where a model has too few tensors for either.
    """
    total = sum(layer.nbytes for layer in layers)
    alone = max(1, total // max(1, sum(layer.nbytes > 0 for layer in layers)))
    smaller, larger = nbytes / alone, total / nbytes
    if max(smaller, larger) < SPREAD:
        return None
    return wfbp(1) if smaller >= larger else fused(total)


def link_of(points: Mapping[int, float], before: Link | None) -> Link:
    """The link that explains messages of these sizes; of one size, all but a startup is rate."""
    sizes = sorted(points)
    if sizes[-1] >= SPREAD * sizes[0]:
        return fit(list(points.items()))
    nbytes, seconds = sum(points), math.fsum(points.values())
    alpha = min(before.alpha if before else STARTUP, seconds / len(points) / 2)
    return Link(alpha, (seconds - alpha * len(points)) / nbytes)


def ratio(usual: Mapping[int, float], now: Mapping[int, float]) -> float:
    """How many times longer messages take than they used to; 1 if none can be compared."""
    both = usual.keys() & now.keys()
    before = math.fsum(usual[size] for size in both)
    return math.fsum(now[size] for size in both) / before if before else 1.0


def told(link: Link) -> str:
    """A link in words."""
    rate = f"{8e-9 / link.beta:.3g} Gbit/s" if link.beta else "any rate"
    return f"a message takes {1e3 * link.alpha:.3g} ms and {rate}"


def summary(keys: Sequence[Sequence[str]]) -> str:
    """What became of tensors: how many were fused, cut, or sent alone."""
    fused = [names for names in keys if len(names) > 1]
    cut = [names[0] for names in keys if len(names) == 1 and names[0].endswith("]")]
    of = len({key.rpartition("[")[0] for key in cut})
    alone = len(keys) - len(fused) - len(cut)
    told = (
        (fused, f"{sum(map(len, fused))} tensors fused into {_counted(len(fused))}"),
        (cut, f"{of} cut into {len(cut)}"),
        (alone, f"{alone} alone"),
    )
    return ", ".join(text for there, text in told if there) or "nothing to send"


def _counted(messages: int) -> str:
    return f"{messages} message{'s' if messages > 1 else ''}"
