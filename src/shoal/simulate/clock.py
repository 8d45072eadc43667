"""Virtual time: an event queue whose time jumps from one event to the next, without sleeping.

A process is a generator. It yields a number of seconds to sleep, or a :class:`ClockEvent` to wait
for, and is sent the value of that event. Functions that are due at the same time run in the order
in which they were scheduled, so every run is the same::

    >>> clock = Clock()
    >>> def worker(name, seconds):
    ...     yield seconds
    ...     return f"{name} done at {clock.now}"
    >>> def boss():
    ...     a, b = clock.start(worker("a", 2.0)), clock.start(worker("b", 1.5))
    ...     return (yield a), (yield b)
    >>> both = clock.start(boss())
    >>> clock.run()
    2.0
    >>> both.value
    ('a done at 2.0', 'b done at 1.5')
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from functools import partial
from itertools import count
from typing import Any

from shoal.errors import BadArgument

Process = Generator["float | ClockEvent", Any, Any]
"""Yields seconds or events. The event from ``Clock.start`` gets its return value as value."""


class ClockEvent:
    """An event that happens once, with a value; processes can wait for it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: list[Callable[[Any], None]] = []
        self.happened = False
        self.value: Any = None

    def fire(self, value: Any = None) -> None:
        """Make the event happen now. All that wait for it resume at this time, in order."""
        if self.happened:
            raise BadArgument(f"fire({value!r})", "this event has already happened; create another")
        self.happened, self.value = True, value
        for resume in self._waiting:
            self._clock.after(0, partial(resume, value))
        self._waiting.clear()

    def then(self, fn: Callable[[Any], None]) -> None:
        """Call ``fn(value)`` when the event happens, or at the present time if it has happened."""
        if self.happened:
            self._clock.after(0, partial(fn, self.value))
        else:
            self._waiting.append(fn)


class Clock:
    """The time of a simulation, in seconds, and its queue of events."""

    def __init__(self) -> None:
        self.now = 0.0
        self.running = 0
        """Number of processes that have not ended. Those left after ``run()`` wait forever."""
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._turn = count()

    def at(self, time: float, fn: Callable[[], None]) -> None:
        """Call ``fn`` at ``time`` (seconds), which must not be in the past."""
        if not self.now <= time < float("inf"):
            raise BadArgument(f"at({time})", f"time must be finite and at least {self.now}, now")
        heapq.heappush(self._queue, (time, next(self._turn), fn))

    def after(self, delay: float, fn: Callable[[], None]) -> None:
        """Call ``fn`` after ``delay`` seconds."""
        if not 0 <= delay < float("inf"):
            raise BadArgument(f"after({delay})", "the delay must be finite and >= 0 seconds")
        self.at(self.now + delay, fn)

    def event(self) -> ClockEvent:
        """Return an event that has not happened yet."""
        return ClockEvent(self)

    def start(self, process: Process) -> ClockEvent:
        """Start a process now; return an event that happens at its end, with its return value."""
        ended = self.event()
        self.running += 1
        self.after(0, partial(self._resume, process, ended, None))
        return ended

    def run(self, until: float | None = None) -> float:
        """Run what is scheduled up to and including ``until``, and return the new time.

        If ``until`` is None, run until nothing is scheduled any more.
        """
        if until is not None and not self.now <= until:
            raise BadArgument(f"run(until={until})", f"until must be at least {self.now}, now")
        while self._queue and (until is None or self._queue[0][0] <= until):
            self.now, _, fn = heapq.heappop(self._queue)
            fn()
        if until is not None:
            self.now = until
        return self.now

    def _resume(self, process: Process, ended: ClockEvent, value: Any) -> None:
        try:
            wanted = process.send(value)
        except StopIteration as stop:
            self.running -= 1
            ended.fire(stop.value)
            return
        if isinstance(wanted, ClockEvent):
            wanted.then(partial(self._resume, process, ended))
        else:
            self.after(wanted, partial(self._resume, process, ended, None))
