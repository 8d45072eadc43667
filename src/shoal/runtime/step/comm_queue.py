"""Run communication jobs in the order of their submission, which is equal on all ranks.

`InlineQueue` runs a job at once in the caller's thread. `CommThread` runs jobs in its own thread,
so that backward does not wait for wires that block, nor for flows with several rounds.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from shoal.flow import Asks
from shoal.wire.wire import Pending, Wire

Job = Callable[[], None]
Result = TypeVar("Result")


class PendingFlow:
    """A flow that was started over a wire. It has issued its first ask, or it has ended."""

    __slots__ = ("_flow", "_pending", "_wire")

    def __init__(self, flow: Asks, wire: Wire) -> None:
        self._flow, self._wire = flow, wire
        self._pending: Pending | None = None
        self._advance(None)

    def _advance(self, answer: Any) -> None:
        try:
            ask = self._flow.send(answer)
        except StopIteration:
            self._pending = None
        else:
            self._pending = self._wire.ask(ask)

    def finish(self) -> None:
        """Wait for the answer, issue the next ask, and so on until the flow ends."""
        while self._pending is not None:
            self._advance(self._pending.wait())


class InlineQueue:
    """Runs each job at once, in the caller's thread."""

    def submit(self, job: Job) -> int:
        """Run a job, and return 0 as its number, which ``join`` accepts."""
        job()
        return 0

    def call(self, start: Callable[[], Callable[[], Result]]) -> Callable[[], Result]:
        """Call ``start``, and return its return value, a function that waits for the result."""
        return start()

    def join(self, upto: int | None = None) -> None:
        """Do nothing, because all submitted jobs have run."""

    def close(self) -> None:
        """Do nothing. ``CommThread`` overrides this to end its thread."""


class CommThread(InlineQueue):
    """Runs jobs in one communication thread. ``join`` raises the first error of a job."""

    def __init__(self, name: str = "shoal-exchange") -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._submitted = self._finished = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> int:
        """Queue a job, and return its number, which can be passed to ``join``."""
        with self._changed:
            self._submitted += 1
            number = self._submitted
        self._jobs.put(job)
        return number

    def call(self, start: Callable[[], Callable[[], Result]]) -> Callable[[], Result]:
        """Queue the call of ``start``, and return a function that waits for the result."""
        started: list[Callable[[], Result]] = []
        self.submit(lambda: started.append(start()))

        def wait() -> Result:
            self.join()
            return started[0]()

        return wait

    def join(self, upto: int | None = None) -> None:
        """Wait for all jobs, or for jobs up to number ``upto``, and raise the first error."""
        with self._changed:
            if upto is not None:
                self._changed.wait_for(lambda: self._finished >= upto or self._error is not None)
                if self._error is None:
                    return
            self._changed.wait_for(lambda: self._finished == self._submitted)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread after the queued jobs. Wait at most 5 seconds for its end."""
        self._jobs.put(None)
        self._thread.join(5)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._error is None:  # after an error, skip the jobs until join raises it
                    job()
            except BaseException as error:
                self._error = error
            with self._changed:
                self._finished += 1
                self._changed.notify_all()
