"""The work that a collective returns, and the queue that runs a group's collectives in order.

A synchronous call runs at once in the caller's thread if no other collective is queued or runs.
All other calls are queued, and a thread of the group runs them in the background. Collectives
always run in the order of calls. The thread of the queue also runs the callbacks of futures. If a
callback waits for another collective, the thread runs queued collectives until that one is done.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work as TorchWork

from shoal.errors import ExchangeTimeout
from shoal.wire.shm.memory.barrier import Barrier

CollectiveCall = Callable[[], None]


class Work(TorchWork):
    """A collective that is under way or done. ``tensors`` get its result, and ``queue`` runs it."""

    def __init__(
        self, tensors: Sequence[Tensor], *, done: bool = False, queue: WorkQueue | None = None
    ) -> None:
        super().__init__()
        self._tensors, self._done, self._queue = tensors, done, queue
        self._error: BaseException | None = None
        self._gate: threading.Lock | None = None
        self._future: Any = None
        self._tokens = [None]  # the thread that pops the only token sets the future
        if not done:
            self._gate = threading.Lock()
            self._gate.acquire()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the work as done, wake the waiting threads, then run the future's callbacks."""
        self.mark_done(error)
        self.run_callbacks()

    def mark_done(self, error: BaseException | None) -> None:
        """Mark the work as done, and wake the waiting threads."""
        self._error, self._done = error, True
        if self._gate is not None:
            self._gate.release()

    def run_callbacks(self) -> None:
        """Set the future if there is one, which runs its callbacks. This happens only once."""
        if self._future is None:
            return
        with contextlib.suppress(IndexError):
            self._tokens.pop()
            if self._error is None:
                self._future.set_result(list(self._tensors))
            else:
                self._future.set_exception(self._error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the collective is done, and return True. Raise its error if it failed.

        Raises:
            ExchangeTimeout: the collective is not done within ``timeout``, but it continues.
        """
        if not self._done and self._queue is not None:
            self._queue.run_until(self.is_completed)
        if not self._done and self._gate is not None:
            seconds = timeout.total_seconds() if timeout else 0.0
            if not self._gate.acquire(timeout=seconds if seconds > 0 else -1):
                raise ExchangeTimeout(f"a collective is not done within {seconds:g} s, and goes on")
            self._gate.release()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Do the same as :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the collective is done, with or without an error."""
        return self._done

    def is_success(self) -> bool:
        """Return whether the collective is done without an error."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the collective, or None if there is no error."""
        return self._error

    def result(self) -> list[Tensor]:
        """Wait until the collective is done, and return the tensors with the result."""
        self.wait()
        return list(self._tensors)

    def get_future(self) -> Any:
        """Return a torch future whose value is the list of tensors with the result."""
        if self._future is None:
            queue = self._queue
            self._future = torch.futures.Future() if queue is None else QueueFuture(queue)
            if self._done:
                self.run_callbacks()
        return self._future


class QueueFuture(torch.futures.Future[Any]):
    """A future that callbacks in the thread of the queue may wait for without a deadlock."""

    def __init__(self, queue: WorkQueue) -> None:
        super().__init__()
        self._queue = queue

    def wait(self) -> Any:
        """Wait and return the value. The queue's own thread runs queued collectives meanwhile."""
        self._queue.run_until(self.done)
        return super().wait()


class FinishedWork(Work):
    """The work of a collective that was run in the caller's thread, and is done."""

    def __init__(self) -> None:
        super().__init__((), done=True)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True


class WorkQueue:
    """Runs a group's collectives one after the other, in the order of calls."""

    def __init__(self, barrier: Barrier) -> None:
        self._barrier, self.stopped = barrier, False
        self._busy = threading.Lock()  # locked by the thread that runs a collective
        self._queue: queue.SimpleQueue[tuple[Work, CollectiveCall] | None] = queue.SimpleQueue()
        self._pending = 0  # number of queued collectives that are not done; guarded by _count_lock
        self._count_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._finished = FinishedWork()  # shared by all calls, because creating one is slow

    def run(self, call: CollectiveCall, tensors: Sequence[Tensor], *, background: bool) -> Work:
        """Run a collective now or queue it. Return its work, which has no tensors if it ran now."""
        if not background and not self._pending and self._busy.acquire(blocking=False):
            try:
                if not self._pending:
                    self._barrier.prepare(background=False)
                    call()
                    return self._finished
            except BaseException as error:
                self._barrier.record_failure(error)
                raise
            finally:
                self._busy.release()
        work = Work(tensors, queue=self)
        with self._count_lock:
            self._pending += 1
            if self._thread is None:
                name = "shoal collectives"
                self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
                self._thread.start()
            self._queue.put((work, call))
        if not background:
            work.wait()
        return work

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            self._run_queued(*item)
            del item

    def run_until(self, done: Callable[[], bool]) -> None:
        """Run queued collectives until ``done()``. Do nothing outside the queue's own thread."""
        if self._thread is None or threading.get_ident() != self._thread.ident:
            return
        while not done():
            item = self._queue.get()
            if item is None:  # this is the signal to stop, which is left for _loop
                self._queue.put(None)
                return
            self._run_queued(*item)

    def _run_queued(self, work: Work, call: CollectiveCall) -> None:
        error: BaseException | None = None
        with self._busy:
            try:
                self._barrier.prepare(background=True)
                call()
            except BaseException as raised:
                self._barrier.record_failure(raised)
                error = raised
        work.mark_done(error)
        with self._count_lock:  # before callbacks, because one may wait for another collective
            self._pending -= 1
        work.run_callbacks()

    def stop(self) -> None:
        """Let the thread run the queued collectives and end. Wait for the thread at most 5 s."""
        self.stopped = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join(5)
