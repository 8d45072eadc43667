"""Measure what the rounds of a bucket take, for the flows of its next round.

A flow is a function of value, state and round, so it must not read a clock. The caller
measures, and passes the seconds along with the value (``Value.timing``).
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

    A wait is exposed while the step cannot go on: always, unless the runtime calls :meth:`overlap`
    and marks exposed waits by :meth:`standing`. Flows run in one thread. The rank that ``speaks``
    logs the choices.
    """

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, *, speaks: bool = False
    ) -> None:
        self.now = now
        self._speaks = speaks
        self._took: dict[str, tuple[float, float]] = {}
        # Exposed seconds so far, and when the present exposed wait began. One tuple, because the
        # thread that runs backward writes it while the thread that runs flows reads it.
        self._exposed: tuple[float, float | None] = 0.0, 0.0
        self._counted = 0.0  # exposed seconds when a flow ran last: what follows is another's wait

    def overlap(self) -> None:
        """Count no wait as exposed from here on, except inside :meth:`standing`."""
        self._exposed = 0.0, None

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Count the time spent inside as exposed communication."""
        self._exposed = self._exposed_seconds(), self.now()
        try:
            yield
        finally:
            self._exposed = self._exposed_seconds(), None

    def _exposed_seconds(self) -> float:
        before, since = self._exposed
        return before if since is None else before + self.now() - since

    def annotate(self, values: Sequence[Value]) -> list[Value]:
        """Return the values of a bucket with the timing of its last round."""
        names = [value.name for value in values]
        bucket = zlib.crc32("\n".join(names).encode()) or 1
        labels = list(names) if self._speaks else [""] * len(names)
        if self._speaks and len(names) > 1:
            labels[0] += f" and {len(names) - 1} more"
        return [
            value._replace(timing=BucketTiming(bucket, self._took.get(name), index == 0, label))
            for index, (value, name, label) in enumerate(zip(values, names, labels, strict=True))
        ]

    def timed(
        self, flow: Generator[Ask, Any, Result], keys: Sequence[str]
    ) -> Generator[Ask, Any, Result]:
        """Run a flow, and record its seconds for the values of these names."""
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
