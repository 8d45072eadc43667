"""Measure the times of steps: when gradients arrive, and how long messages are under way.

All ranks must make the same plan from these numbers, so one small all-reduce behind the gradients
replaces them by their maxima over ranks:

* the backward seconds of the slowest rank, layer by layer, because all ranks wait for it;
* the shortest seconds of messages on any rank, step by step (negated), because the other ranks were
  early, and waited for their peers and not for the link;
* the step seconds of the slowest rank.

Times are the host's: on a device, a gradient arrives when its kernel is launched.
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
    """The dense size of a message, and when it was under way."""

    nbytes: int
    start: float
    stop: float


@dataclass(slots=True)
class StepRecord:
    """The moments of one step."""

    began: float  # backward
    arrivals: dict[str, float] = field(default_factory=dict)  # of gradients
    tasks: dict[int, list[float]] = field(default_factory=dict)  # start and end of each


class StepTimer:
    """Records the moments of steps. Gradient hooks call it, so it does little."""

    def __init__(self, now: Clock = time.perf_counter) -> None:
        self.now = now
        self.step = 0  # of the exchange: the same on all ranks
        self.records: dict[int, StepRecord] = {}
        self._record = StepRecord(now())

    def open(self) -> None:
        """Begin a record: backward starts."""
        self._record = self.records[self.step] = StepRecord(self.now())

    def arrived(self, name: str) -> None:
        """Record that a gradient has been computed."""
        self._record.arrivals[name] = self.now()

    def wire(self, index: int, wire: Wire) -> Wire:
        """Return a wire that records the moments of one task."""
        start = self.now()
        span = self._record.tasks.setdefault(index, [start, start])
        return TimedWire(wire, span, self.now)


class TimedWire:
    """A wire that writes the moment of its last answer to the second number of ``span``."""

    def __init__(self, wire: Wire, span: list[float], now: Clock) -> None:
        self.size, self.blocks = wire.size, wire.blocks
        self._inner, self._span, self._now = wire, span, now

    def ask(self, ask: Ask) -> Pending:
        """Issue an ask; record its answer by the work's callback, or else when it is waited for."""
        pending = self._inner.ask(ask)
        inner = pending.pending if isinstance(pending, TracedPending) else pending
        if notifies(inner, self._arrived):
            return pending
        if isinstance(inner, Ready):
            self._arrived()
            return pending
        return TracedPending(pending, self._arrived)

    def leave(self) -> None:
        """Leave the inner wire: the run is over."""
        self._inner.leave()

    def _arrived(self, *_: object) -> None:
        self._span[1] = self._now()


class Measurements(NamedTuple):
    """Measured times of some steps, the same on all ranks."""

    backward: dict[str, float]  # seconds of each parameter
    messages: dict[int, float]  # seconds of one message, by average size
    step: float  # seconds; inf if no whole step was measured
    changes: dict[str, float]  # |update| / |value| of each parameter


def backward_seconds(began: float, arrivals: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each gradient: since the one before it, or since the start."""
    seconds = {}
    for name, moment in sorted(arrivals.items(), key=lambda item: item[1]):
        seconds[name] = max(0.0, moment - began)
        began = moment
    return seconds


def busy_seconds(messages: Iterable[MessageTiming]) -> float:
    """Return the seconds during which at least one message was under way."""
    busy, free = 0.0, -math.inf
    for _, start, stop in sorted(messages, key=lambda m: m.start):
        busy += max(0.0, stop - max(start, free))
        free = max(free, stop)
    return busy


def service_seconds(messages: Iterable[MessageTiming]) -> dict[int, float]:
    """Return the average seconds of a message, by average size; empty if there was none.

    Averages over a step, because messages that are under way at once share the link.
    """
    sent = [message for message in messages if message.nbytes]
    if not sent:
        return {}
    return {mean_nbytes([message.nbytes for message in sent]): busy_seconds(sent) / len(sent)}


def mean_nbytes(sizes: Sequence[int]) -> int:
    """Return the average size of messages that are not empty; 0 if all are."""
    sent = [nbytes for nbytes in sizes if nbytes]
    return sum(sent) // len(sent) if sent else 0


class MeasurementLayout(NamedTuple):
    """Which numbers the ranks compare, in an order that all share."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    steps: int

    def numbers(
        self, records: Sequence[StepRecord | None], nbytes: Sequence[int], step: float
    ) -> list[float]:
        """Return the numbers of this rank, to be replaced by the maxima over ranks."""
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
        """Return the measurements that these maxima over ranks hold."""
        count, width = len(self.names), len(self.sizes)
        messages = {}
        for column, size in enumerate(self.sizes):
            shortest = (-n for n in numbers[count + column : count + self.steps * width : width])
            if known := [seconds for seconds in shortest if 0 < seconds < math.inf]:
                messages[size] = median(known)
        backward = dict(zip(self.names, numbers, strict=False))
        changed = dict(zip(self.names, changes, strict=False))
        return Measurements(backward, messages, numbers[-1] or math.inf, changed)
