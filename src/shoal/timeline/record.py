"""Recording spans as they happen, at about a microsecond each.

``add`` appends one tuple to a bounded deque: atomic, so the communication thread may add beside the
main one with no lock. Checking, rounding and sorting wait until the run is over.

Times are ``time.perf_counter()`` seconds. The unix time at which the recorder began is kept as
``origin_ns``, so that workers of one host align; across hosts give each its clock's ``offset``.
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

_Raw = tuple[int, str, str, float, float, int, int]  # number of the span, then as in ``add``


class Recorder:
    """One worker's spans; when more than ``capacity`` come, the oldest go.

    Args:
        worker: its rank.
        capacity: spans kept; 200,000 are about 40 MB and some thousand steps.
        offset: seconds to add to this host's clock to get the reference host's.
    """

    enabled = True

    def __init__(self, worker: int, *, capacity: int = 200_000, offset: float = 0.0) -> None:
        if capacity < 1:
            raise BadArgument(f"Recorder(capacity={capacity})", "capacity must be at least 1")
        self.worker = worker
        unix_ns, self._zero = _clocks()
        self._origin_ns = unix_ns + round(offset * 1e9)
        self._kept: deque[_Raw] = deque(maxlen=capacity)
        self._append = self._kept.append
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
        """Note a span that is over, by a Span's fields; ``start`` is a ``time.perf_counter()``."""
        self._append((self._number(), lane, name, start, seconds, nbytes, step))

    def span(self, lane: str, name: str, *, nbytes: int = 0, step: int = NO_STEP) -> Open:
        """``with recorder.span("compute", "forward", step=3): ...``; an error is timed as well."""
        return Open(self, (lane, name), nbytes, step)

    def timeline(self, meta: Mapping[str, Any] | None = None) -> Timeline:
        """What was recorded so far, with ``meta`` as facts of the run.

        When spans were dropped, the step they were dropped from goes as a whole: half a step would
        look like a fast one.
        """
        kept = self._kept.copy()
        dropped = max((raw[0] for raw in kept), default=-1) + 1 - len(kept)
        torn_step = kept[0][-1] if dropped else NO_STEP
        whole = [raw for raw in kept if raw[-1] != torn_step or torn_step < 0]
        facts = {**(meta or {}), "origin_ns": self._origin_ns}
        if dropped:
            facts["dropped"] = {str(self.worker): dropped + len(kept) - len(whole)}
        return Timeline(map(self._span, whole), facts)

    def write(self, directory: str | Path, meta: Mapping[str, Any] | None = None) -> Path | None:
        """Write ``<directory>/spans-<worker>.jsonl`` for ``collect``."""
        return write_spans(self.timeline(meta), directory, worker=self.worker)

    def _span(self, raw: _Raw) -> Span:
        _, lane, name, start, seconds, nbytes, step = raw
        start = round(start - self._zero, 9)  # the clock ticks in nanoseconds
        return Span(self.worker, lane, name, start, round(seconds, 9), nbytes, step)


class NullRecorder(Recorder):
    """Records nothing and writes nothing; what a run without a timeline holds."""

    enabled = False

    def __init__(self, worker: int = 0) -> None:
        super().__init__(worker, capacity=1)
        self._never = Never(self, ("", ""), 0, NO_STEP)

    def add(
        self,
        lane: str,
        name: str,
        start: float,
        seconds: float,
        nbytes: int = 0,
        step: int = NO_STEP,
    ) -> None:
        """Nothing."""

    def span(self, lane: str, name: str, *, nbytes: int = 0, step: int = NO_STEP) -> Open:
        """One that times nothing, the same each time."""
        return self._never

    def write(self, directory: str | Path, meta: Mapping[str, Any] | None = None) -> Path | None:
        """Nothing; None."""
        return None


class Open:
    """A span that is under way; ``nbytes`` may be set until it ends."""

    __slots__ = ("_recorder", "_start", "_what", "nbytes", "step")

    def __init__(self, recorder: Recorder, what: tuple[str, str], nbytes: int, step: int) -> None:
        self._recorder = recorder
        self._what = what
        self._start = 0.0
        self.nbytes = nbytes
        self.step = step

    def __enter__(self) -> Open:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        start = self._start
        lane, name = self._what
        self._recorder.add(lane, name, start, time.perf_counter() - start, self.nbytes, self.step)


class Never(Open):
    """A span that is not recorded."""

    __slots__ = ()

    def __enter__(self) -> Open:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _clocks(tries: int = 5) -> tuple[int, float]:
    """Unix nanoseconds and ``perf_counter`` seconds of one moment; the tightest of some tries."""
    best: tuple[int, int, int] | None = None
    for _ in range(tries):
        before = time.perf_counter_ns()
        unix = time.time_ns()
        gap = time.perf_counter_ns() - before
        if best is None or gap < best[0]:
            best = gap, unix, before + gap // 2
    return (best[1], best[2] / 1e9) if best else (time.time_ns(), time.perf_counter())
