"""What steps take: when gradients come, how long messages are under way, agreed on by all ranks.

A schedule that measures is planned anew from these numbers. Every rank must make the same plan, so
the numbers are made the same first, by one small all-reduce that leaves with the gradients:

* the slowest rank's backward, layer by layer: all wait for it;
* the shortest time that messages took on any rank, step by step: the others were early, and waited
  for their peers, not for the link;
* the slowest rank's step.

Times are the host's. Where a device computes behind it, arrivals tell when work was launched.

Note exchanges on the timeline: from the ask to the moment its answer arrived.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from shoal.flow import Ask, nbytes
from shoal.timeline.record import Recorder
from shoal.wire.wire import Pending, PendingWork, Ready, Wire

Clock = Callable[[], float]


class MessageTiming(NamedTuple):
    """Bytes that a message stands for, and when it was under way."""

    nbytes: int
    start: float
    stop: float


class StepRecord:
    """One step: when backward began, when each gradient came, each task's first and last moment."""

    __slots__ = ("arrivals", "began", "tasks")

    def __init__(self, began: float) -> None:
        self.began = began
        self.arrivals: dict[str, float] = {}
        self.tasks: dict[int, list[float]] = {}


class StepTimer:
    """Notes moments of steps as they pass; used by hooks, so it does little.

    Args:
        now: seconds, of any origin.
    """

    def __init__(self, now: Clock = time.perf_counter) -> None:
        self.now = now
        self.step = 0  # of the agreement: the same on every rank
        self.records: dict[int, StepRecord] = {}
        self._record = StepRecord(now())

    def open(self) -> None:
        """Backward begins."""
        self._record = self.records[self.step] = StepRecord(self.now())

    def arrived(self, name: str) -> None:
        """A gradient is there."""
        self._record.arrivals[name] = self.now()

    def wire(self, index: int, wire: Wire) -> Wire:
        """The same wire, watched on behalf of one task."""
        start = self.now()
        span = self._record.tasks.setdefault(index, [start, start])
        return TimedWire(wire, span, self.now)


class TimedWire:
    """A wire that notes when the last of its answers was there.

    Args:
        wire: who answers.
        span: whose second number is the last moment.
        now: seconds.
    """

    def __init__(self, wire: Wire, span: list[float], now: Clock) -> None:
        self.size, self.blocks = wire.size, wire.blocks
        self._inner, self._span, self._now = wire, span, now

    def ask(self, ask: Ask) -> Pending:
        """Issue an ask; what can tell by itself that it is over does, others when waited for."""
        pending = self._inner.ask(ask)
        under_way = pending.pending if isinstance(pending, TracedPending) else pending
        if isinstance(under_way, PendingWork) and under_way.works and under_way.signals:
            under_way.works[-1].get_future().add_done_callback(self._over)
            return pending
        if isinstance(under_way, Ready):
            self._over()
            return pending
        return TracedPending(pending, self._over)

    def leave(self) -> None:
        """The run is over."""
        self._inner.leave()

    def _over(self, *_: Any) -> None:
        self._span[1] = self._now()


class Measurements(NamedTuple):
    """What some steps took, the same on every rank."""

    backward: dict[str, float]  # seconds a parameter
    messages: dict[int, float]  # seconds of one, by their average size
    step: float  # seconds; inf if none was seen whole
    changes: dict[str, float]  # |update| / |value| a parameter


def backward_seconds(began: float, arrivals: Mapping[str, float]) -> dict[str, float]:
    """What each gradient took: from the arrival of the one before it, or the start."""
    taken = {}
    for name, moment in sorted(arrivals.items(), key=lambda item: item[1]):
        taken[name] = max(0.0, moment - began)
        began = moment
    return taken


def busy_seconds(messages: Iterable[MessageTiming]) -> float:
    """Seconds during which at least one message was under way."""
    busy, free = 0.0, -math.inf
    for _, start, stop in sorted(messages, key=lambda m: m.start):
        busy += max(0.0, stop - max(start, free))
        free = max(free, stop)
    return busy


def service_seconds(messages: Iterable[MessageTiming]) -> dict[int, float]:
    """What a message takes, on average, by its average size; empty if there was none.

    Several are under way at once and share the link, so no single one tells what it takes; all of a
    step together do. Steps with other messages make other points of the link's line.
    """
    sent = [message for message in messages if message.nbytes]
    if not sent:
        return {}
    return {mean_nbytes([message.nbytes for message in sent]): busy_seconds(sent) / len(sent)}


def mean_nbytes(sizes: Sequence[int]) -> int:
    """Of messages that carry something; 0 if none does."""
    sent = [nbytes for nbytes in sizes if nbytes]
    return sum(sent) // len(sent) if sent else 0


class MeasurementLayout(NamedTuple):
    """Which numbers travel, in an order that all ranks share."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    steps: int

    def numbers(
        self, records: Sequence[StepRecord | None], nbytes: Sequence[int], step: float
    ) -> list[float]:
        """Mine, such that the maximum over ranks is what counts; see :meth:`seen`."""
        backward: dict[str, list[float]] = {}
        told: list[float] = []
        for record in records:
            spans = record.tasks.items() if record is not None else ()
            taken = service_seconds(MessageTiming(nbytes[index], *span) for index, span in spans)
            told += [-taken[size] if size in taken else -math.inf for size in self.sizes]
            if record is not None:
                for name, seconds in backward_seconds(record.began, record.arrivals).items():
                    backward.setdefault(name, []).append(seconds)
        mine = [median(backward[name]) if name in backward else 0.0 for name in self.names]
        return [*mine, *told, step]

    def seen(self, numbers: Sequence[float], changes: Sequence[float] = ()) -> Measurements:
        """What the maxima say."""
        count, width = len(self.names), len(self.sizes)
        backward = dict(zip(self.names, numbers, strict=False))
        messages = {}
        for column, size in enumerate(self.sizes):
            found = [-n for n in numbers[count + column : count + self.steps * width : width]]
            if known := [seconds for seconds in found if 0 < seconds < math.inf]:
                messages[size] = median(known)
        changed = dict(zip(self.names, changes, strict=False))
        return Measurements(backward, messages, numbers[-1] or math.inf, changed)


class TracedPending(NamedTuple):
    """An answer under way whose arrival is noted."""

    pending: Pending
    arrived: Callable[[], None]

    def wait(self) -> Any:
        """Wait, and note it unless the work's own callback did."""
        answer = self.pending.wait()
        self.arrived()
        return answer


class TracedWire:
    """A wire whose exchanges are spans.

    Args:
        wire: who answers.
        recorder: where the spans go.
    """

    def __init__(self, wire: Wire, recorder: Recorder) -> None:
        self.size = wire.size
        self.blocks = wire.blocks
        self.inner = wire
        self.step = 0
        self._recorder = recorder

    def ask(self, ask: Ask) -> Pending:
        """Issue an ask; its span ends when the answer is there, not when somebody looks."""
        if not self._recorder.enabled:
            return self.inner.ask(ask)
        start, step, size = time.perf_counter(), self.step, nbytes(ask)
        unnoted = [True]

        def arrived(*_: object) -> None:
            try:
                unnoted.pop()  # at once, for two threads may come together
            except IndexError:
                return
            seconds = time.perf_counter() - start
            self._recorder.add("exchange", type(ask).__name__, start, seconds, size, step)

        pending = self.inner.ask(ask)
        if isinstance(pending, PendingWork) and pending.works and pending.signals:
            pending.works[-1].get_future().add_done_callback(arrived)
        return TracedPending(pending, arrived)

    def leave(self) -> None:
        """The run is over."""
        self.inner.leave()
