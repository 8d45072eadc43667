"""Record spans during a run. Recording one span takes about a microsecond.

``add`` appends one tuple to a bounded deque. This is atomic, so the communication thread and the
main thread can both add without a lock. Checks, rounding and sorting are done after the run.

``add`` takes times of ``time.perf_counter()``. In a timeline, time 0 is when the recorder was made.
``origin_ns`` is the Unix time of that moment, and aligns the clocks of workers on one host. A
worker on another host corrects ``origin_ns`` by an ``offset``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from shoal.errors import BadArgument
from shoal.timeline.files import write_spans
from shoal.timeline.span import NO_STEP, Span
from shoal.timeline.timeline import Timeline

_Raw = tuple[int, str, str, float, float, int, int]  # serial number, then the arguments of ``add``


class Recorder:
    """Records the spans of one worker. If there are over ``capacity``, the oldest are dropped.

    Args:
        worker: the rank of the worker.
        capacity: number of spans to keep. 200,000 spans take about 40 MB, and last for some
            thousand steps.
        offset: seconds to add to this host's clock to get the clock of the reference host.
    """

    enabled = True

    def __init__(self, worker: int, *, capacity: int = 200_000, offset: float = 0.0) -> None:
        if capacity < 1:
            raise BadArgument(f"Recorder(capacity={capacity})", "capacity must be at least 1")
        self.worker = worker
        unix_ns, self._zero = _clocks()
        self._origin_ns = unix_ns + round(offset * 1e9)
        self._spans: deque[_Raw] = deque(maxlen=capacity)
        self._append = self._spans.append
        self._number = count().__next__

    def add(
        self,
        lane: str,
        name: str,
        start: float,
        seconds: float,
        nbytes: int = 0,
        step: int = NO_STEP,
    ) -> None:
        """Record a finished span; ``start`` is a value of ``time.perf_counter()``."""
        self._append((self._number(), lane, name, start, seconds, nbytes, step))

    def span(self, lane: str, name: str, *, nbytes: int = 0, step: int = NO_STEP) -> OpenSpan:
        """Return a context manager that records its block as a span, also if the block raises."""
        return OpenSpan(self, (lane, name), nbytes, step)

    def timeline(self, meta: Mapping[str, Any] | None = None) -> Timeline:
        """Return the spans recorded so far, with ``meta`` as facts about the run.

        If spans were dropped, the step of the oldest kept span may be incomplete, and would look
        faster than it was. So all spans of this step are left out, too.
        """
        spans = self._spans.copy()
        dropped = max((raw[0] for raw in spans), default=-1) + 1 - len(spans)
        partial_step = spans[0][-1] if dropped else NO_STEP
        whole = [raw for raw in spans if raw[-1] != partial_step or partial_step < 0]
        facts = {**(meta or {}), "origin_ns": self._origin_ns}
        if dropped:
            facts["dropped"] = {str(self.worker): dropped + len(spans) - len(whole)}
        return Timeline(map(self._span, whole), facts)

    def write(self, directory: str | Path, meta: Mapping[str, Any] | None = None) -> Path | None:
        """Write ``<directory>/spans-<worker>.jsonl``, which ``collect`` reads; return its path."""
        return write_spans(self.timeline(meta), directory, worker=self.worker)

    def _span(self, raw: _Raw) -> Span:
        _, lane, name, start, seconds, nbytes, step = raw
        start = round(start - self._zero, 9)  # the clock's unit is 1 ns
        return Span(self.worker, lane, name, start, round(seconds, 9), nbytes, step)


class NullRecorder(Recorder):
    """The recorder of a run without a timeline; it records and writes nothing."""

    enabled = False

    def __init__(self, worker: int = 0) -> None:
        super().__init__(worker, capacity=1)
        self._null_span = NullSpan(self, ("", ""), 0, NO_STEP)

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def span(self, lane: str, name: str, *, nbytes: int = 0, step: int = NO_STEP) -> OpenSpan:
        """Return a context manager that records nothing."""
        return self._null_span

    def write(self, directory: str | Path, meta: Mapping[str, Any] | None = None) -> None:
        """Do nothing."""


class OpenSpan:
    """A context manager that records its block as a span. The block may set ``nbytes``."""

    __slots__ = ("_label", "_recorder", "_start", "nbytes", "step")

    def __init__(self, recorder: Recorder, label: tuple[str, str], nbytes: int, step: int) -> None:
        self._recorder = recorder
        self._label = label  # lane and name
        self._start = 0.0
        self.nbytes = nbytes
        self.step = step

    def __enter__(self) -> OpenSpan:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        seconds = time.perf_counter() - self._start
        self._recorder.add(*self._label, self._start, seconds, self.nbytes, self.step)


class NullSpan(OpenSpan):
    """A context manager that records nothing."""

    __slots__ = ()

    def __enter__(self) -> OpenSpan:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _clocks(tries: int = 5) -> tuple[int, float]:
    """Return the same moment as Unix nanoseconds and as ``perf_counter`` seconds.

    The clocks are read one after the other, ``tries`` times. The try with the least delay is used.
    """
    readings = []
    for _ in range(tries):
        before, unix, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        readings.append((after - before, unix, (before + after) // 2))
    _, unix, moment = min(readings)
    return unix, moment / 1e9
