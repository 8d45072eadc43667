"""Send and receive between two ranks of a host, by tag, from a given rank or from any.

Whoever waits for a message drives all of them (``mail``); a thread takes over only while nobody
waits.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from ctypes import memmove

from torch import Tensor

from shoal.errors import FaultError
from shoal.wire.shm.memory.barrier import LOOKS, PRESENT, Board, give_way
from shoal.wire.shm.memory.cma import Reader
from shoal.wire.shm.memory.ring import Ring
from shoal.wire.shm.node.p2p_queues import Mail, Parcel

_GRACE_SECONDS = 0.001  # before the thread takes over: mostly the caller is about to wait
_ALERT_SECONDS = 0.1  # after the last message, until then nobody need wake the thread


class Post:
    """Carries all messages of one rank.

    Args:
        board: of the group.
        outward: the ring to each other rank.
        inward: the ring from each other rank.
        reader: of the other ranks' memory.
    """

    def __init__(
        self,
        board: Board,
        outward: Sequence[Ring | None],
        inward: Sequence[Ring | None],
        reader: Reader,
    ) -> None:
        self.board, self._mail = board, Mail(outward, inward, reader)
        self._lock, self._changed = threading.Lock(), threading.Condition()
        self._thread: threading.Thread | None = None
        self._driven, self._stopped, self._alert, self._active = 0, False, False, 0.0

    def _parcel(self, flat: Tensor, tag: int, peer: int | None) -> Parcel:
        self.board.require_whole()
        end = time.monotonic() + self.board.seconds
        return Parcel(flat, tag, peer=peer, end=end, drive=self._drive)

    def send(self, flat: Tensor, peer: int, *, tag: int) -> Parcel:
        """Begin to send a message."""
        parcel = self._parcel(flat, tag, peer)
        with self._lock:
            self._mail.send(parcel, peer)
        return self._entrust(parcel)

    def receive(
        self,
        flat: Tensor,
        peer: int | None,
        *,
        tag: int,
        finally_: Callable[[], None] | None = None,
    ) -> Parcel:
        """Begin to receive a message into ``flat``."""
        parcel = self._parcel(flat, tag, peer)
        parcel.finally_ = finally_
        with self._lock:
            kept = self._mail.expect(parcel)
        if kept is not None:
            self._drive(kept[1])  # its last cells may still be on their way
            _deliver(parcel, *kept)
        return self._entrust(parcel)

    def _entrust(self, parcel: Parcel) -> Parcel:
        if not parcel.is_completed():
            self._active = time.monotonic()
            if not self._alert:
                self._alarm()
        return parcel

    def _alarm(self) -> None:
        with self._changed:
            self._alert = True
            if self._thread is None:
                name = "shoal messages"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def _drive(self, parcel: Parcel, end: float = math.inf) -> None:
        """Carry messages until this one has arrived, or until the end of patience."""
        # Another thread than the first is somebody's background: see Board.ready.
        looks = LOOKS if threading.current_thread() is threading.main_thread() else 0
        self._driven += 1
        try:
            while not parcel.is_completed() and time.monotonic() < end:
                self._carry(parcel.is_completed, looks)
        finally:
            self._driven -= 1

    def _carry(self, done: Callable[[], bool], looks: int = 0) -> None:
        """Move messages; if none moves, look out for a change, then sleep until there is one."""
        lines = self.board.lines
        heard = lines.bell()
        with self._lock:
            moved = self._mail.progress()
        if moved or done():
            return
        for _ in range(looks):
            if lines.bell() != heard:
                break
            give_way()
        lines.listen(heard)
        self._complain()

    def _run(self) -> None:
        idle = self._mail.idle
        while True:
            with self._changed:
                if idle() and time.monotonic() - self._active > _ALERT_SECONDS:
                    self._alert = False
                    self._changed.wait()
                elif not self._stopped:
                    self._changed.wait(_GRACE_SECONDS)
                if self._stopped:
                    return
            if not self._driven and not idle():
                self._carry(idle)

    def _complain(self) -> None:
        """Give up the messages whose other end has died, left or been silent for too long."""
        with self._lock:
            waiting = list(self._mail.waiting())
            failed = [(p, error) for verb, p in waiting if (error := self._fault(verb, p))]
            if self._mail.progress() or not failed:  # some came before their other end left
                return
            halved = next((error for p, error in failed if self._mail.begun(p)), None)
            if halved is not None:  # the other half would be taken for a message of its own
                self.board.broke(halved)
                failed = [(parcel, halved) for _, parcel in waiting]
            for parcel, error in failed:
                self._mail.drop(parcel)
                parcel.finish(error)

    def _fault(self, verb: str, parcel: Parcel) -> FaultError | None:
        """What has become of those a message waits for, if it waits in vain."""
        ends = self._ends(parcel)
        try:
            self.board.require_whole()
            self.board.check(f"{verb} (tag {parcel.tag})", ends, parcel.end)
        except FaultError as error:
            return error if self._ends(parcel) == ends else None  # or another may yet send it
        return None

    def _ends(self, parcel: Parcel) -> list[int]:
        """Whom a message waits for; of several, those who are still there."""
        if parcel.peer is not None:
            return [parcel.peer]
        lines = self.board.lines
        others = [rank for rank in range(lines.size) if rank != lines.rank]
        return [r for r in others if lines.status(r) == PRESENT and lines.peers[r].alive] or others

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            thread, self._thread, self._stopped = self._thread, None, True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(5)


def _deliver(parcel: Parcel, source: int, kept: Parcel) -> None:
    kept.wait()
    parcel.peer = source
    error = parcel.misfit(kept.nbytes)
    if error is None:
        memmove(parcel.address, kept.address, kept.nbytes)
    parcel.finish(error)
