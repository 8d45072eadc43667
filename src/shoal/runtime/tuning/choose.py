"""Choose the fastest schedule by measured steps, and choose again when the link changes.

1. *Survey*: measure some steps with the first plan, and some with messages of a very different
   size. Two sizes are needed to fit the startup of a message and its seconds per byte. There is no
   survey for a schedule that only reorders its messages.
2. *Trial*: run each contender for some steps. Then run the contenders close to the fastest again.
3. *Choice*: choose the first contender, the most promising, unless another is clearly faster.
4. *Watch*: begin a new trial when messages take at least twice, or at most half, their usual time
   in two consecutive calls of ``look``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from shoal.analysis.links import Link, fit
from shoal.axes.scheduling import Layer, Schedule, fused, wfbp
from shoal.runtime.tuning.measure import Measurements
from shoal.tuner import Tuner, TunerState, close

STARTUP = 1e-4  # assumed startup seconds of a message, if only one size was measured
SPREAD = 2  # fit a line only if the largest message is at least this many times the smallest
CHANGED = 2.0  # messages this many times slower or faster in two looks: the link changed
CLEARLY = 0.98  # clearly faster means less than this times the first contender's seconds
CLOSE = 1.1  # close means at most this times the step seconds of the fastest contender
FINALISTS = 3  # run at most so many close contenders again
RULES = Tuner(0, clearly=CLEARLY, changed=math.nextafter(CHANGED, 0))  # CHANGED itself counts


class ScheduleChoice(NamedTuple):
    """A schedule, the measured layers and link to plan with, and the reason, for the log."""

    schedule: Schedule
    layers: dict[str, Layer]
    link: Link
    why: str


class ScheduleTuner:
    """Decides from measurements which schedule to use next. ``layers`` need only have sizes."""

    def __init__(self, schedule: Schedule, layers: Sequence[Layer]) -> None:
        self.schedule, self.layers = schedule, list(layers)
        self.link: Link | None = None
        self._points: dict[int, float] = {}  # nbytes -> seconds of a message
        self._usual: dict[int, float] | None = None  # ``messages`` of the first look after a choice
        self._surveyed = False
        self._contenders: Sequence[Schedule] = ()
        self._choices: list[ScheduleChoice] = []  # one for each contender that has run
        self._finalists: list[int] | None = None  # contenders to run again, if decided
        self._tuner, self._state = RULES, RULES.start()._replace(trying=False)

    def look(self, seen: Measurements) -> ScheduleChoice | None:
        """Return the schedule to use after these measurements, or None to keep the current one."""
        if self.schedule.measures == "changes":
            changes = seen.changes
            self.layers = [x._replace(change=changes.get(x.name, 0)) for x in self.layers]
            return self._choice(self.schedule, "ordered by how much parameters change")
        if not seen.messages:
            return None
        if self._state.trying:
            return self._judge(seen)
        if self.link is None:
            return self._survey(seen) or self._begin(seen, "the link is measured")
        if self._usual is None:
            self._usual = dict(seen.messages)
        slower = ratio(self._usual, seen.messages)
        self._state = self._tuner.look(self._state, slower)
        if self._state.odd < 2:
            return None
        self._points.clear()
        return self._begin(seen, f"messages take {slower:.2g} times their usual seconds")

    def _survey(self, seen: Measurements) -> ScheduleChoice | None:
        """Return a schedule with messages of a very different size, or None if no survey is due."""
        if self._surveyed or self.schedule.reorders:
            return None
        self._surveyed = True
        self._points.update(seen.messages)
        survey = unlike(next(iter(self._points)), self.layers)
        return self._choice(survey, "run to measure messages of another size") if survey else None

    def _begin(self, seen: Measurements, why: str) -> ScheduleChoice:
        """Begin a trial of the contenders, and return the first contender."""
        link = self._learn(seen)
        offered = self.schedule.contenders
        self._contenders = offered(self.layers, link.cost) if offered else (self.schedule,)
        self._choices, self._finalists, self._usual = [], None, None
        self._tuner = replace(RULES, candidates=len(self._contenders))
        self._state = self._tuner.start()
        return self._try(f"{why}; {link_text(link)}")

    def _try(self, why: str) -> ScheduleChoice:
        self._choices.append(self._choice(self._contenders[self._state.at], why))
        return self._choices[-1]

    def _judge(self, seen: Measurements) -> ScheduleChoice:
        """Record a contender's step seconds. Return the next contender, or the chosen one."""
        state = self._tuner.observe(self._tuner.advance(self._state), seen.step)
        self._state, link = state, self._learn(seen)
        if not self._tuner.tried(state):
            return self._try("the next contender")
        if self._finalists is None:
            self._finalists = finalists(state)
        if self._finalists:
            at = self._finalists.pop(0)
            self._state = state._replace(at=at)
            return self._choices[at]._replace(why="run again, because it is close to the fastest")
        chosen = best(state)
        self._state = self._tuner.settle(state, chosen)
        seconds = zip(self._choices, state.summary(fmean), strict=True)
        steps = ", ".join(f"{choice.schedule} {1e3 * mean:.3g} ms" for choice, mean in seconds)
        return self._choices[chosen]._replace(why=f"best of {steps} per step; {link_text(link)}")

    def _learn(self, seen: Measurements) -> Link:
        """Update the link and the layers from measurements, and return the link."""
        self._points.update(seen.messages)
        self.link = link_of(self._points, self.link)
        self.layers = [
            # Forward is not timed. It computes one matrix product, and backward two.
            layer._replace(backward=seconds, forward=seconds / 2)
            for layer in self.layers
            for seconds in [seen.backward.get(layer.name, layer.backward)]
        ]
        return self.link

    def _choice(self, schedule: Schedule, why: str) -> ScheduleChoice:
        link = self.link or Link(STARTUP, 1e-9)
        return ScheduleChoice(schedule, {layer.name: layer for layer in self.layers}, link, why)


def best(state: TunerState) -> int:
    """Return the index of the contender to choose, among those that ran twice if any did.

    Contenders that ran once are not compared with them, because the load may have changed.
    """
    means = dict(enumerate(state.summary(fmean)))
    twice = {i: mean for i, mean in means.items() if len(state.samples[i]) > 1}
    return RULES.best(twice or means)


def finalists(state: TunerState) -> list[int]:
    """Return the contenders to run again, fastest first, or [] if only one is close."""
    near = close(dict(enumerate(state.summary(fmean))), CLOSE, FINALISTS)
    return near if len(near) > 1 else []


def unlike(nbytes: int, layers: Sequence[Layer]) -> Schedule | None:
    """Return a schedule with messages of a size very different from ``nbytes``.

    It sends each tensor alone, or all fused. None if neither size differs by the factor SPREAD.
    """
    total = sum(layer.nbytes for layer in layers)
    alone = max(1, total // max(1, sum(layer.nbytes > 0 for layer in layers)))
    smaller, larger = nbytes / alone, total / nbytes
    if max(smaller, larger) < SPREAD:
        return None
    return wfbp(1) if smaller >= larger else fused(total)


def link_of(points: Mapping[int, float], before: Link | None) -> Link:
    """Fit a link to ``points``, which maps the nbytes of a message to its seconds.

    If the sizes are too similar to fit a line, the startup is that of ``before``, or STARTUP, but
    at most half of the mean seconds.
    """
    sizes = sorted(points)
    if sizes[-1] >= SPREAD * sizes[0]:
        return fit(list(points.items()))
    nbytes, seconds = sum(points), math.fsum(points.values())
    alpha = min(before.alpha if before else STARTUP, seconds / len(points) / 2)
    return Link(alpha, (seconds - alpha * len(points)) / nbytes)


def ratio(usual: Mapping[int, float], now: Mapping[int, float]) -> float:
    """Return the seconds of messages now / the usual seconds, or 1 if no size is in both."""
    both = usual.keys() & now.keys()
    before = math.fsum(usual[size] for size in both)
    return math.fsum(now[size] for size in both) / before if before else 1.0


def link_text(link: Link) -> str:
    """Return the startup and the rate of a link as text, for the log."""
    rate = f" plus its bytes at {8e-9 / link.beta:.3g} Gbit/s" if link.beta else ", however large"
    return f"a message takes {1e3 * link.alpha:.3g} ms{rate}"


def summary(keys: Sequence[Sequence[str]]) -> str:
    """Return how many tensors are fused, cut or alone, as text. ``keys`` is by message."""
    fused = [names for names in keys if len(names) > 1]
    cut = [names[0] for names in keys if len(names) == 1 and names[0].endswith("]")]
    tensors_cut = len({key.rpartition("[")[0] for key in cut})
    alone = len(keys) - len(fused) - len(cut)
    messages = f"{len(fused)} message{'s' if len(fused) > 1 else ''}"
    texts = (
        (fused, f"{sum(map(len, fused))} tensors fused into {messages}"),
        (cut, f"{tensors_cut} cut into {len(cut)}"),
        (alone, f"{alone} alone"),
    )
    return ", ".join(text for some, text in texts if some) or "nothing to send"
