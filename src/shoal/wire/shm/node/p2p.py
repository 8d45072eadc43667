"""Send and receive between two ranks of a node, by tag. A receive may accept any source.

A thread that waits for one message sends and receives parts of all messages (``p2p_queues``). While
no thread waits, a helper thread does the same.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from ctypes import memmove

from torch import Tensor

from shoal.errors import FaultError
from shoal.wire.shm.memory.barrier import PRESENT, SPINS, Barrier, sched_yield
from shoal.wire.shm.memory.cma import CmaReader
from shoal.wire.shm.node.p2p_queues import P2PQueues, P2PWork, Rings

_GRACE_SECONDS = 0.001  # the helper thread waits so long, because callers often wait at once
_AWAKE_SECONDS = 0.1  # how long the helper thread stays awake after the last message


class P2P:
    """Sends and receives all messages of one rank.

    It uses the timeout and the failure checks of ``barrier``, but never enters the barrier.
    """

    def __init__(
        self, barrier: Barrier, outgoing: Rings, incoming: Rings, reader: CmaReader
    ) -> None:
        self._barrier, self._queues = barrier, P2PQueues(outgoing, incoming, reader)
        self._lock, self._wakeup = threading.Lock(), threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiters, self._stopped = 0, False
        self._awake, self._last_active = False, 0.0

    def _work(self, flat: Tensor, tag: int, peer: int | None) -> P2PWork:
        self._barrier.require_usable()
        end = time.monotonic() + self._barrier.seconds
        return P2PWork(flat, tag, peer=peer, end=end, drive=self._drive)

    def send(self, flat: Tensor, peer: int, *, tag: int) -> P2PWork:
        """Begin to send a message to ``peer``."""
        work = self._work(flat, tag, peer)
        with self._lock:
            self._queues.send(work, peer)
        return self._wake_helper(work)

    def receive(
        self, flat: Tensor, peer: int | None, *, tag: int, on_success: Callable[[], None]
    ) -> P2PWork:
        """Begin to receive a message from ``peer`` (any rank if None) into ``flat``.

        If the message has already begun to arrive unexpectedly, wait until it is complete.
        """
        work = self._work(flat, tag, peer)
        work.on_success = on_success
        with self._lock:
            unexpected = self._queues.post_receive(work)
        if unexpected is not None:
            source, message = unexpected
            self._drive(message)  # it may not be complete yet
            message.wait()
            work.peer = source
            error = work.size_error(message.nbytes)
            if error is None:
                memmove(work.address, message.address, message.nbytes)
            work.finish(error)
        return self._wake_helper(work)

    def _wake_helper(self, work: P2PWork) -> P2PWork:
        """Wake or start the helper thread if the message is not complete. Return the work."""
        if not work.is_completed():
            self._last_active = time.monotonic()
            if not self._awake:
                with self._wakeup:
                    self._awake = True
                    if self._thread is None:
                        name = "shoal messages"
                        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                        self._thread.start()
                    self._wakeup.notify()
        return work

    def _drive(self, work: P2PWork, end: float = math.inf) -> None:
        """Send and receive messages until this one is complete, or until the time ``end``."""
        # Only the main thread spins. Barrier.prepare explains why other threads do not.
        spins = SPINS if threading.current_thread() is threading.main_thread() else 0
        self._waiters += 1
        try:
            while not work.is_completed() and time.monotonic() < end:
                self._progress(work.is_completed, spins)
        finally:
            self._waiters -= 1

    def _progress(self, done: Callable[[], bool], spins: int = 0) -> None:
        """Send and receive what is possible. If nothing is, wait for this rank's bell or 50 ms."""
        headers = self._barrier.headers
        bell = headers.bell()
        with self._lock:
            moved = self._queues.progress()
        if moved or done():
            return
        for _ in range(spins):
            if headers.bell() != bell:
                break
            sched_yield()
        headers.sleep_until_rung(bell)
        self._fail_undeliverable()

    def _run(self) -> None:
        idle = self._queues.idle
        while True:
            with self._wakeup:
                if idle() and time.monotonic() - self._last_active > _AWAKE_SECONDS:
                    self._awake = False
                    self._wakeup.wait()
                elif not self._stopped:
                    self._wakeup.wait(_GRACE_SECONDS)
                if self._stopped:
                    return
            if not self._waiters and not idle():
                self._progress(idle)

    def _fail_undeliverable(self) -> None:
        """Fail messages that :meth:`_fault` finds, or all messages if one of these is partial."""
        with self._lock:
            pending = list(self._queues.pending())
            failed = [(work, error) for verb, work in pending if (error := self._fault(verb, work))]
            if self._queues.progress() or not failed:  # something moved meanwhile
                return
            partial = next((error for w, error in failed if self._queues.is_partial(w)), None)
            if partial is not None:  # otherwise its rest would be taken for a new message
                self._barrier.record_failure(partial)
                failed = [(work, partial) for _, work in pending]
            for work, error in failed:
                self._queues.remove(work)
                work.finish(error)

    def _fault(self, verb: str, work: P2PWork) -> FaultError | None:
        """Return the error of a message if it cannot be completed or has timed out, or None."""
        peers = self._awaited_peers(work)
        try:
            self._barrier.require_usable()
            self._barrier.check(f"{verb} (tag {work.tag})", peers, work.end)
        except FaultError as error:
            # if one of several peers was lost meanwhile, another may still send the message
            return error if self._awaited_peers(work) == peers else None
        return None

    def _awaited_peers(self, work: P2PWork) -> list[int]:
        """Return the ranks that a message waits for.

        A receive from any rank waits for the other ranks that are alive, or for all if none is.
        """
        if work.peer is not None:
            return [work.peer]
        headers = self._barrier.headers
        others = [rank for rank in range(headers.size) if rank != headers.rank]
        living = [r for r in others if headers.status(r) == PRESENT and headers.peers[r].alive]
        return living or others

    def stop(self) -> None:
        """End the helper thread, waiting for it at most 5 s."""
        with self._wakeup:
            thread, self._thread, self._stopped = self._thread, None, True
            self._wakeup.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(5)
