"""Send and receive between two ranks of a host, by tag, from a given rank or from any.

Whoever waits for a message drives all of them; a thread takes over only while nobody waits. A
message that nobody has asked for stays with its sender, unless it is in the way of one that
somebody has: then it is kept aside. Messages of one sender and tag arrive in the order sent.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import memmove
from datetime import timedelta

import torch
from torch import Tensor

from shoal.errors import FaultError, LayoutMismatch
from shoal.wire.shm.board import Board
from shoal.wire.shm.lines import PRESENT
from shoal.wire.shm.ring import Cell, Ring
from shoal.wire.shm.work import Work

_GRACE_SECONDS = 0.001  # before the thread takes over: mostly the caller is about to wait
_ALERT_SECONDS = 0.1  # after the last message, until then nobody need wake the thread


class Parcel(Work):
    """A message that is being sent or received.

    Args:
        post: who carries it.
        flat: its numbers, contiguous.
        tag: must match.
        peer: the other rank, or None for any.
    """

    def __init__(self, post: Post, flat: Tensor, *, tag: int, peer: int | None) -> None:
        super().__init__([flat])
        self.flat, self.tag, self.peer, self._post = flat, tag, peer, post
        self.address, self.nbytes, self.start = flat.data_ptr(), flat.nbytes, 0
        self.end = time.monotonic() + post.board.seconds
        self.finally_: Callable[[], None] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is sent or received, and raise what went wrong."""
        if not self._done:
            self._post.drive(self)
        return super().wait()

    def _source_rank(self) -> int:
        return -1 if self.peer is None else self.peer

    def source_rank(self) -> int:
        """Whom the message came from."""
        return self._source_rank()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark as done; put the message into a tensor that was not contiguous."""
        if error is None and self.finally_ is not None:
            self.finally_()
        super().finish(error)


class Post:
    """All messages of one rank.

    Args:
        board: of the group.
        outward: the ring to each other rank.
        inward: the ring from each other rank.
    """

    def __init__(
        self, board: Board, outward: Sequence[Ring | None], inward: Sequence[Ring | None]
    ) -> None:
        self.board = board
        self._out, self._in = tuple(outward), tuple(inward)
        self._leaving: dict[int, deque[Parcel]] = {}
        self._awaited: list[Parcel] = []
        self._taking: dict[int, Parcel] = {}  # by source: the message whose cells are coming
        self._aside: list[tuple[int, Parcel]] = []
        self._lock, self._changed = threading.Lock(), threading.Condition()
        self._thread: threading.Thread | None = None
        self._driven, self._stopped, self._alert, self._active = 0, False, False, 0.0

    def send(self, flat: Tensor, peer: int, *, tag: int) -> Parcel:
        """Begin to send a message."""
        parcel = Parcel(self, flat, tag=tag, peer=peer)
        with self._lock:
            self._leaving.setdefault(peer, deque()).append(parcel)
            self._progress()
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
        parcel = Parcel(self, flat, tag=tag, peer=peer)
        parcel.finally_ = finally_
        with self._lock:
            kept = self._kept(parcel)
            if kept is None:
                self._awaited.append(parcel)
                self._progress()
        if kept is not None:
            self._deliver(parcel, *kept)
        return self._entrust(parcel)

    def _kept(self, parcel: Parcel) -> tuple[int, Parcel] | None:
        """A message kept aside that this one was for."""
        for index, (source, other) in enumerate(self._aside):
            if other.tag == parcel.tag and parcel.peer in (None, source):
                return self._aside.pop(index)
        return None

    def _deliver(self, parcel: Parcel, source: int, kept: Parcel) -> None:
        kept.wait()  # its last cells may still be on their way
        parcel.peer = source
        error = _misfit(parcel, kept.nbytes)
        if error is None:
            memmove(parcel.address, kept.address, kept.nbytes)
        parcel.finish(error)

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

    def drive(self, parcel: Parcel) -> None:
        """Carry messages until this one has arrived."""
        self._driven += 1
        try:
            while not parcel.is_completed():
                heard = self.board.lines.bell()
                with self._lock:
                    moved = self._progress()
                if not moved and not parcel.is_completed():
                    self.board.lines.listen(heard)
                    self._complain()
        finally:
            self._driven -= 1

    def _pending(self) -> bool:
        return bool(self._awaited or self._leaving or self._taking)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._pending() and time.monotonic() - self._active > _ALERT_SECONDS:
                    self._alert = False
                    self._changed.wait()
                elif not self._stopped:
                    self._changed.wait(_GRACE_SECONDS)
                if self._stopped:
                    return
            if self._driven or not self._pending():
                continue
            heard = self.board.lines.bell()
            with self._lock:
                moved = self._progress()
            if not moved and self._pending():
                self.board.lines.listen(heard)
                self._complain()

    def _progress(self) -> bool:
        """Move every message as far as it goes; the lock is held."""
        moved = False
        for peer in list(self._leaving):
            moved |= self._push(peer)
        for source, ring in enumerate(self._in):
            if ring is not None and (self._awaited or source in self._taking):
                moved |= self._pull(source, ring)
        return moved

    def _push(self, peer: int) -> bool:
        ring, waiting, moved = self._out[peer], self._leaving[peer], False
        while waiting and ring is not None:
            parcel = waiting[0]
            start = ring.write(
                parcel.tag, address=parcel.address, nbytes=parcel.nbytes, start=parcel.start
            )
            moved |= start != parcel.start
            parcel.start = start
            if start < max(parcel.nbytes, 1):
                return moved
            waiting.popleft()
            parcel.finish()
        del self._leaving[peer]
        return moved

    def _pull(self, source: int, ring: Ring) -> bool:
        moved = False
        while (cell := ring.peek()) is not None:
            taking = self._taking.get(source) or self._addressee(source, cell)
            if taking is None:
                return moved
            self._taking[source] = taking
            if cell.start + cell.nbytes <= taking.nbytes:
                memmove(taking.address + cell.start, cell.address, cell.nbytes)
            ring.take()
            moved = True
            if cell.start + max(cell.nbytes, 1) >= max(cell.total, 1):
                del self._taking[source]
                taking.finish(_misfit(taking, cell.total))
        return moved

    def _addressee(self, source: int, cell: Cell) -> Parcel | None:
        """Who waits for the message that begins in a cell; else room aside, if it is in the way."""
        blocked = False
        for parcel in self._awaited:
            if parcel.peer in (None, source):
                if parcel.tag == cell.tag:
                    self._awaited.remove(parcel)
                    parcel.peer = source
                    return parcel
                blocked = True
        if not blocked:
            return None
        room = torch.empty(cell.total, dtype=torch.uint8)
        kept = Parcel(self, room, tag=cell.tag, peer=source)
        self._aside.append((source, kept))
        return kept

    def _complain(self) -> None:
        """Give up the messages whose other end has died, left or been silent for too long."""
        with self._lock:
            if self._progress():
                return
            sending = [p for waiting in self._leaving.values() for p in waiting]
            for parcel in (*sending, *self._awaited, *self._taking.values()):
                verb = "send" if parcel in sending else "receive"
                try:
                    self.board.check(f"{verb} (tag {parcel.tag})", self._ends(parcel), parcel.end)
                except FaultError as error:
                    self._give_up(parcel, error)

    def _ends(self, parcel: Parcel) -> list[int]:
        """Whom a message waits for; of several, those who are still there."""
        if parcel.peer is not None:
            return [parcel.peer]
        lines = self.board.lines
        others = [rank for rank in range(lines.size) if rank != lines.rank]
        return [r for r in others if lines.status(r) == PRESENT and lines.peers[r].alive] or others

    def _give_up(self, parcel: Parcel, error: FaultError) -> None:
        self._awaited = [p for p in self._awaited if p is not parcel]
        self._taking = {s: p for s, p in self._taking.items() if p is not parcel}
        for waiting in self._leaving.values():
            if parcel in waiting:
                waiting.remove(parcel)
        if not parcel.is_completed():
            parcel.finish(error)

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            thread, self._thread, self._stopped = self._thread, None, True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(5)


def _misfit(parcel: Parcel, nbytes: int) -> LayoutMismatch | None:
    if nbytes == parcel.nbytes:
        return None
    return LayoutMismatch(
        f"receive (tag {parcel.tag}): rank {parcel.peer} sent {nbytes} bytes, "
        f"but the tensor here has {parcel.nbytes}; both ends need the same size and type"
    )
