"""Measure the seconds of each round of a bucket, and pass them to the flows of its next round.

The result of a flow must depend only on value, state and round, so a flow must not read a clock.
The caller measures, and passes the seconds in ``Value.timing``.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from shoal.axes.compression.compressor import BucketTiming, Value
from shoal.flow import Ask

Result = TypeVar("Result")


class Stopwatch:
    """Measures the seconds that flows compute, and the exposed seconds that they wait for answers.

    Waiting is exposed if the training step waits, too. All waiting counts as exposed, until the
    runtime calls :meth:`overlap`. From then on, only waiting inside :meth:`exposed_wait` counts as
    exposed. All flows run in one thread. With ``logs``, values get labels, so that flows on this
    rank log their choices.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter, *, logs: bool = False) -> None:
        self.now = now
        self._logs = logs
        self._took: dict[str, tuple[float, float]] = {}
        # (exposed seconds so far, start of the current exposed wait or None). It is one tuple, as
        # the thread that runs backward replaces it while the thread that runs flows reads it.
        self._exposed: tuple[float, float | None] = 0.0, 0.0
        # Exposed seconds when a flow last paused or ended. The flow that resumes next adds the
        # exposed seconds since then to its own.
        self._counted = 0.0

    def overlap(self) -> None:
        """From now on, count waiting as exposed only inside :meth:`exposed_wait`."""
        self._exposed = 0.0, None

    @contextmanager
    def exposed_wait(self) -> Iterator[None]:
        """Return a context manager; the time inside it counts as exposed."""
        self._exposed = self._exposed_seconds(), self.now()
        try:
            yield
        finally:
            self._exposed = self._exposed_seconds(), None

    def _exposed_seconds(self) -> float:
        before, since = self._exposed
        return before if since is None else before + self.now() - since

    def annotate(self, values: Sequence[Value]) -> list[Value]:
        """Return the values of a bucket, with the measured times of their last round."""
        names = [value.name for value in values]
        bucket = zlib.crc32("\n".join(names).encode()) or 1
        labels = list(names) if self._logs else [""] * len(names)
        if self._logs and len(names) > 1:
            labels[0] += f" and {len(names) - 1} more"
        return [
            value._replace(timing=BucketTiming(bucket, self._took.get(name), index == 0, label))
            for index, (value, name, label) in enumerate(zip(values, names, labels, strict=True))
        ]

    def timed(
        self, flow: Generator[Ask, Any, Result], keys: Sequence[str]
    ) -> Generator[Ask, Any, Result]:
        """Run a flow, and record its seconds for the values with the names ``keys``."""
        encode = exposed = 0.0
        answer: Any = None
        while True:
            start = self.now()
            try:
                ask = flow.send(answer)
            except StopIteration as end:
                took = encode + self.now() - start, exposed
                self._took.update(dict.fromkeys(keys, took))
                self._counted = self._exposed_seconds()
                result: Result = end.value
                return result
            encode += self.now() - start
            self._counted = self._exposed_seconds()
            answer = yield ask
            exposed += self._exposed_seconds() - self._counted
