"""Where asks are issued from: at once in the caller, or from a communication thread.

Either way they are issued one after the other in the order submitted, which is the same on every
rank. A thread is for wires that block and for flows that ask again: it waits, backward does not.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from shoal.runtime.step.modes import Asks
from shoal.wire.wire import Pending, Wire

Job = Callable[[], None]


class PendingFlow:
    """A flow between an ask and its answer.

    Args:
        flow: to run.
        wire: who answers.
    """

    __slots__ = ("_flow", "_pending", "_wire")

    def __init__(self, flow: Asks, wire: Wire) -> None:
        self._flow = flow
        self._wire = wire
        self._pending: Pending | None = None
        self._advance(None)

    def _advance(self, answer: Any) -> None:
        try:
            ask = self._flow.send(answer)
        except StopIteration:
            self._pending = None
            return
        self._pending = self._wire.ask(ask)

    def finish(self) -> None:
        """Wait for answers until the flow ends."""
        while self._pending is not None:
            self._advance(self._pending.wait())


class InlineQueue:
    """Jobs run at once, in the caller's thread."""

    def submit(self, job: Job) -> int:
        """Run it."""
        job()
        return 0

    def join(self, upto: int | None = None) -> None:
        """Nothing is left to wait for."""

    def close(self) -> None:
        """Nothing to close."""


class CommThread:
    """Jobs run in one communication thread, in order; an error surfaces at the next join."""

    def __init__(self, name: str = "shoal-exchange") -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._given = self._ran = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> int:
        """Queue it; its number, to join up to it."""
        with self._idle:
            self._given += 1
            number = self._given
        self._jobs.put(job)
        return number

    def join(self, upto: int | None = None) -> None:
        """Wait until all jobs ran, or those up to a number; raise the first error there was."""
        with self._idle:
            if upto is not None:
                self._idle.wait_for(lambda: self._ran >= upto or self._error is not None)
                if self._error is None:
                    return
            self._idle.wait_for(lambda: self._ran == self._given)
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
            with self._idle:
                self._ran += 1
                self._idle.notify_all()
