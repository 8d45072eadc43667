"""Measure the times of steps: when gradients are computed, and how long messages take.

All ranks must make the same plan from these numbers. So one small all-reduce behind the gradients
computes the maximum over ranks of:

* the backward seconds of each layer, because all ranks wait for the slowest;
* the negated seconds of messages in each step, which gives the shortest seconds, because a rank
  with longer seconds was early, and waited for its peers and not for the link;
* the step seconds.

All times are taken on the host. On a GPU, a gradient "arrives" when its kernel is launched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from shoal.flow import Ask
from shoal.wire.wire import Pending, Ready, TracedPending, Wire, notifies

Clock = Callable[[], float]


class MessageTiming(NamedTuple):
    """The size of a message before compression, and when its transfer started and stopped."""

    nbytes: int
    start: float
    stop: float


@dataclass(slots=True)
class StepRecord:
    """When the parts of one step happened, in seconds of the clock."""

    began: float  # start of backward
    arrivals: dict[str, float] = field(default_factory=dict)  # of gradients, by name
    tasks: dict[int, list[float]] = field(default_factory=dict)  # bucket -> [start, end]


class StepTimer:
    """Records when the parts of each step happen. Gradient hooks call it, so it does little."""

    def __init__(self, now: Clock = time.perf_counter) -> None:
        self.now = now
        self.step = 0  # number of exchanges so far, the same on all ranks
        self.records: dict[int, StepRecord] = {}
        self._record = StepRecord(now())

    def open(self) -> None:
        """Start the record of a step, when its backward starts."""
        self._record = self.records[self.step] = StepRecord(self.now())

    def arrived(self, name: str) -> None:
        """Record that a gradient has been computed."""
        self._record.arrivals[name] = self.now()

    def wire(self, index: int, wire: Wire) -> Wire:
        """Return a wire that records the start and the end of one task."""
        start = self.now()
        span = self._record.tasks.setdefault(index, [start, start])
        return TimedWire(wire, span, self.now)


class TimedWire:
    """A wire that writes the time of its last answer to ``span[1]``."""

    def __init__(self, wire: Wire, span: list[float], now: Clock) -> None:
        self.size, self.blocks = wire.size, wire.blocks
        self._inner, self._span, self._now = wire, span, now

    def ask(self, ask: Ask) -> Pending:
        """Issue an ask. Record when its answer arrives, or when ``wait`` returns if unknown."""
        pending = self._inner.ask(ask)
        inner = pending.pending if isinstance(pending, TracedPending) else pending
        if notifies(inner, self._arrived):
            return pending
        if isinstance(inner, Ready):
            self._arrived()
            return pending
        return TracedPending(pending, self._arrived)

    def leave(self) -> None:
        """Leave the inner wire, at the end of the run."""
        self._inner.leave()

    def _arrived(self, *_: object) -> None:
        self._span[1] = self._now()


class Measurements(NamedTuple):
    """The measured times of some steps, the same on all ranks."""

    backward: dict[str, float]  # parameter -> seconds
    messages: dict[int, float]  # average nbytes -> average seconds of a message
    step: float  # seconds of a step, or inf if no complete step was measured
    changes: dict[str, float]  # parameter -> |update| / |value|


def backward_seconds(began: float, arrivals: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds from the previous gradient, or from ``began``, to each gradient."""
    seconds = {}
    for name, moment in sorted(arrivals.items(), key=lambda item: item[1]):
        seconds[name] = max(0.0, moment - began)
        began = moment
    return seconds


def busy_seconds(messages: Iterable[MessageTiming]) -> float:
    """Return the seconds during which at least one message was in transfer."""
    busy, free = 0.0, -math.inf
    for _, start, stop in sorted(messages, key=lambda m: m.start):
        busy += max(0.0, stop - max(start, free))
        free = max(free, stop)
    return busy


def service_seconds(messages: Iterable[MessageTiming]) -> dict[int, float]:
    """Return {average nbytes: average seconds of a message}, or {} if all are empty.

    Both are averages over a step, because messages that are in transfer at once share the link.
    """
    sent = [message for message in messages if message.nbytes]
    if not sent:
        return {}
    return {mean_nbytes([message.nbytes for message in sent]): busy_seconds(sent) / len(sent)}


def mean_nbytes(sizes: Sequence[int]) -> int:
    """Return the average size of the messages that are not empty, or 0 if all are empty."""
    sent = [nbytes for nbytes in sizes if nbytes]
    return sum(sent) // len(sent) if sent else 0


class MeasurementLayout(NamedTuple):
    """The order of the numbers that the ranks reduce, the same on all ranks."""

    names: tuple[str, ...]  # names of the parameters whose backward seconds are reduced
    sizes: tuple[int, ...]  # message sizes whose seconds in each step are reduced
    steps: int

    def numbers(
        self, records: Sequence[StepRecord | None], nbytes: Sequence[int], step: float
    ) -> list[float]:
        """Return this rank's numbers. ``step`` is the median seconds of a step."""
        backward: dict[str, list[float]] = {}
        messages: list[float] = []
        for record in records:
            spans = record.tasks.items() if record is not None else ()
            seconds = service_seconds(MessageTiming(nbytes[index], *span) for index, span in spans)
            messages += [-seconds.get(size, math.inf) for size in self.sizes]
            if record is not None:
                for name, taken in backward_seconds(record.began, record.arrivals).items():
                    backward.setdefault(name, []).append(taken)
        medians = [median(backward[name]) if name in backward else 0.0 for name in self.names]
        return [*medians, *messages, step]

    def seen(self, numbers: Sequence[float], changes: Sequence[float] = ()) -> Measurements:
        """Return the measurements, from the maxima over ranks of :meth:`numbers`."""
        count, width = len(self.names), len(self.sizes)
        messages = {}
        for column, size in enumerate(self.sizes):
            shortest = (-n for n in numbers[count + column : count + self.steps * width : width])
            if known := [seconds for seconds in shortest if 0 < seconds < math.inf]:
                messages[size] = median(known)
        backward = dict(zip(self.names, numbers, strict=False))
        changed = dict(zip(self.names, changes, strict=False))
        return Measurements(backward, messages, numbers[-1] or math.inf, changed)
