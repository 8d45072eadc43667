"""Issue asks in the order submitted, which is the same on every rank.

`InlineQueue` issues them at once in the caller's thread. `CommThread` issues them from a thread of
its own: for wires that block and for flows with several rounds, where backward must not wait.
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
    """A flow that waits for the answer to its last ask over a wire."""

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
        """Wait for answers until the flow ends."""
        while self._pending is not None:
            self._advance(self._pending.wait())


class InlineQueue:
    """Runs each job at once, in the caller's thread."""

    def submit(self, job: Job) -> int:
        """Run a job; return its number, for ``join``."""
        job()
        return 0

    def call(self, start: Callable[[], Callable[[], Result]]) -> Callable[[], Result]:
        """Start an operation; return a function that waits for its result."""
        return start()

    def join(self, upto: int | None = None) -> None:
        """Return at once, because all jobs have run."""

    def close(self) -> None:
        """End the queue."""


class CommThread(InlineQueue):
    """Runs jobs in one communication thread; an error is raised by the next ``join``."""

    def __init__(self, name: str = "shoal-exchange") -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._submitted = self._finished = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> int:
        """Queue a job; return its number, for ``join``."""
        with self._changed:
            self._submitted += 1
            number = self._submitted
        self._jobs.put(job)
        return number

    def call(self, start: Callable[[], Callable[[], Result]]) -> Callable[[], Result]:
        """Queue the start of an operation; the returned function waits for its result."""
        started: list[Callable[[], Result]] = []
        self.submit(lambda: started.append(start()))

        def wait() -> Result:
            self.join()
            return started[0]()

        return wait

    def join(self, upto: int | None = None) -> None:
        """Wait until all jobs ran, or those up to a number; raise the first error."""
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
        """End the thread."""
        self._jobs.put(None)
        self._thread.join(5)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._error is None:  # after an error the rest of the step is void
                    job()
            except BaseException as error:
                self._error = error
            with self._changed:
                self._finished += 1
                self._changed.notify_all()
