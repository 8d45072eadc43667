"""What a collective returns, and the one thread of a group that makes the waiting ones progress.

A call that waits for its result runs at once in the caller's thread, if nothing is before it. What
was called with ``async_op=True`` is queued, and a thread of the group does it in the background;
the order of calls is kept in either case. That thread also runs what hangs on futures; where such a
callback waits for another collective, the thread does what is queued until that is done.
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
from shoal.wire.shm.memory.barrier import Board

Task = Callable[[], None]


class Work(TorchWork):
    """A collective that is under way, or done.

    Args:
        tensors: what it leaves its result in.
        done: whether it is done already.
        lane: that does it.
    """

    def __init__(
        self, tensors: Sequence[Tensor], *, done: bool = False, lane: Lane | None = None
    ) -> None:
        super().__init__()
        self._tensors, self._error = tensors, None
        self._done, self._lane = done, lane
        self._gate: threading.Lock | None = None
        self._future: Any = None
        self._tokens = [None]  # whoever takes it settles the future
        if not done:
            self._gate = threading.Lock()
            self._gate.acquire()

    _error: BaseException | None

    def finish(self, error: BaseException | None = None) -> None:
        """Mark as done; wake whoever waits, then run what hangs on the future."""
        self.conclude(error)
        self.announce()

    def conclude(self, error: BaseException | None) -> None:
        """Mark as done; wake whoever waits."""
        self._error, self._done = error, True
        if self._gate is not None:
            self._gate.release()

    def announce(self) -> None:
        """Run what hangs on the future."""
        if self._future is not None:
            self._settle()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until done, and raise what went wrong.

        Raises:
            ExchangeTimeout: not done within ``timeout``.
        """
        if not self._done and self._lane is not None:
            self._lane.help(self.is_completed)
        if not self._done and self._gate is not None:
            seconds = timeout.total_seconds() if timeout else 0.0
            if not self._gate.acquire(timeout=seconds if seconds > 0 else -1):
                raise ExchangeTimeout(f"a collective is not done within {seconds:g} s")
            self._gate.release()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait until done."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is done, well or not."""
        return self._done

    def is_success(self) -> bool:
        """Whether it is done and well."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong, if anything did."""
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors that hold the result."""
        self.wait()
        return list(self._tensors)

    def get_future(self) -> Any:
        """A torch future of the tensors."""
        if self._future is None:
            self._future = torch.futures.Future() if self._lane is None else Promise(self._lane)
            if self._done:
                self._settle()
        return self._future

    def _settle(self) -> None:
        with contextlib.suppress(IndexError):
            self._tokens.pop()
            if self._error is None:
                self._future.set_result(list(self._tensors))
            else:
                self._future.set_exception(self._error)


class Promise(torch.futures.Future[Any]):
    """A future whose waiter lends a hand if nobody else can do the work.

    Args:
        lane: that does it.
    """

    def __init__(self, lane: Lane) -> None:
        super().__init__()
        self._lane = lane

    def wait(self) -> Any:
        """What torch's does; in a callback after what is queued is done."""
        self._lane.help(self.done)
        return super().wait()


class Done(Work):
    """A collective that was done before its work was asked for."""

    def __init__(self) -> None:
        super().__init__((), done=True)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Nothing to wait for."""
        return True


class Lane:
    """Does tasks one after the other, in the order they came.

    Args:
        board: where tasks meet other ranks; told before each, and of whatever one raises.
    """

    def __init__(self, board: Board) -> None:
        self._board, self.stopped = board, False
        self._busy = threading.Lock()  # held by whoever runs a task
        self._queue: queue.SimpleQueue[tuple[Work, Task] | None] = queue.SimpleQueue()
        self._waiting = 0  # queued, not yet done; changed under _count
        self._count = threading.Lock()
        self._thread: threading.Thread | None = None
        self._done = Done()  # to make one takes as long as a small collective's copy

    def do(self, task: Task, tensors: Sequence[Tensor], *, background: bool) -> Work:
        """Do a task now, or queue it; a task done now leaves a work without tensors."""
        if not background and not self._waiting and self._busy.acquire(blocking=False):
            try:
                if not self._waiting:
                    self._board.ready(background=False)
                    task()
                    return self._done
            except BaseException as error:
                self._board.broke(error)
                raise
            finally:
                self._busy.release()
        work = Work(tensors, lane=self)
        with self._count:
            self._waiting += 1
            if self._thread is None:
                name = "shoal collectives"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._queue.put((work, task))
        if not background:
            work.wait()
        return work

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._take(*item)
            del item

    def help(self, done: Callable[[], bool]) -> None:
        """In the lane's own thread, that is in a callback: do what is queued until this is done."""
        if self._thread is None or threading.get_ident() != self._thread.ident:
            return
        while not done():
            item = self._queue.get()
            if item is None:  # the lane is to stop: leave that to its loop
                self._queue.put(None)
                return
            self._take(*item)

    def _take(self, work: Work, task: Task) -> None:
        error: BaseException | None = None
        with self._busy:
            try:
                self._board.ready(background=True)
                task()
            except BaseException as raised:
                self._board.broke(raised)
                error = raised
        work.conclude(error)
        with self._count:  # before callbacks: one of them may call a collective and wait for it
            self._waiting -= 1
        work.announce()

    def stop(self) -> None:
        """Do what is queued, then end the thread."""
        self.stopped = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join(5)
