"""What a bucket's rounds take, told to the flows of its next one.

A flow is a function of value, state and round. What depends on times is therefore not measured in
it but told to it, with the value, by whoever runs it: the clock is theirs, or a test's.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from shoal.axes.compression.compressor import Told, Value
from shoal.flow import Ask

Result = TypeVar("Result")


class Known(NamedTuple):
    """What all workers together say of rounds of one kind."""

    encode: float  # seconds
    exposed: float  # seconds
    residual: float  # its norm, in norms of a gradient


class Stopwatch:
    """Times flows: seconds that they run, and seconds that the step stands still meanwhile.

    While a flow waits for an answer the step goes on, or stands still: always, unless whoever runs
    it calls :meth:`overlap` and says with :meth:`standing` when. Flows run in one thread.

    Args:
        now: seconds, of any origin.
        speaks: whether this worker says what was chosen.
    """

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, *, speaks: bool = False
    ) -> None:
        self.now = now
        self._speaks = speaks
        self._took: dict[str, tuple[float, float]] = {}
        self._standing: tuple[float, float | None] = 0.0, 0.0  # seconds before, and since when
        self._seen = 0.0  # of these, when a flow ran last: what comes after is another's wait

    def overlap(self) -> None:
        """From here on the step goes on while flows wait, but for :meth:`standing`."""
        self._standing = 0.0, None

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Inside, the step stands still."""
        self._standing = self._stood(), self.now()
        try:
            yield
        finally:
            self._standing = self._stood(), None

    def _stood(self) -> float:
        before, since = self._standing  # one tuple, for another thread may write it
        return before if since is None else before + self.now() - since

    def told(self, values: Sequence[Value]) -> list[Value]:
        """The values of a bucket, with what is known of its last round."""
        names = [value.name for value in values]
        bucket = zlib.crc32("\n".join(names).encode()) or 1
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        made = []
        for index, value in enumerate(values):
            label = value.name + more * (index == 0) if self._speaks else ""
            known = Told(bucket, self._took.get(value.name), index == 0, label)
            made.append(value._replace(told=known))
        return made

    def timed(
        self, flow: Generator[Ask, Any, Result], keys: Sequence[str]
    ) -> Generator[Ask, Any, Result]:
        """The same flow, of the bucket of these values, timed."""
        encode = exposed = 0.0
        answer: Any = None
        while True:
            start = self.now()
            try:
                ask = flow.send(answer)
            except StopIteration as end:
                took = encode + self.now() - start, exposed
                self._took.update(dict.fromkeys(keys, took))
                self._seen = self._stood()
                result: Result = end.value
                return result
            encode += self.now() - start
            self._seen = self._stood()
            answer = yield ask
            exposed += self._stood() - self._seen
