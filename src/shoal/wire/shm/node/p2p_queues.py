"""The queues of one rank's point-to-point messages, and the rings that the messages go through.

As in MPI there are posted receives and unexpected messages. A message without a matching receive
stays in the ring. But if a receive waits for a later message of the same sender, the first message
is copied into a buffer. Messages of one sender and tag arrive in the order in which they were sent.

If the receiver can read the sender's memory (``cma``), the ring carries only the address of a long
message, and the send is complete when the receiver has read the message. But a very long message
goes through the ring if there is a core for each rank, because then one rank writes while the other
one reads.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from ctypes import memmove
from datetime import timedelta

import torch
from torch import Tensor

from shoal.cores import usable_cores
from shoal.errors import ExchangeTimeout, FaultError, LayoutMismatch
from shoal.wire.shm.memory.cma import CmaReader
from shoal.wire.shm.memory.ring import Ring, RingCell
from shoal.wire.shm.work import Work

Rings = Sequence[Ring | None]  # one ring to or from each rank, and None for this rank itself
Drive = Callable[["P2PWork", float], None]
_PIPELINED_NBYTES = 2 << 20  # above this size a ring is faster, if each rank has its own core


class P2PWork(Work):
    """A message to or from the rank ``peer``, which is None for a receive from any rank.

    :meth:`wait` calls ``drive``, which sends and receives until this message is complete, or until
    a time.

    Attributes:
        start: number of bytes written to the ring. After the address is written, it is all bytes.
        end: time of ``time.monotonic`` at which the message times out.
        on_success: called when the message is complete, before waiting threads continue.
    """

    def __init__(
        self, flat: Tensor, tag: int, *, peer: int | None, end: float, drive: Drive | None = None
    ) -> None:
        super().__init__([flat])
        self.tag, self.peer, self._drive = tag, peer, drive
        self.address, self.nbytes, self.start = flat.data_ptr(), flat.nbytes, 0
        self.end, self.any_source = end, peer is None
        self.on_success: Callable[[], None] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is sent or received, and return True. Raise its error if any.

        Raises:
            ExchangeTimeout: the message is not done within ``timeout``, but is still under way.
        """
        seconds = timeout.total_seconds() if timeout else 0.0
        if not self._done and self._drive is not None:
            self._drive(self, time.monotonic() + seconds if seconds > 0 else math.inf)
            if not self._done:
                raise ExchangeTimeout(f"message (tag {self.tag}) is not done within {seconds:g} s")
        return super().wait()

    def source_rank(self) -> int:
        """Return the other rank, or -1 if the sender of a receive is not known yet."""
        return -1 if self.peer is None else self.peer

    _source_rank = source_rank

    def finish(self, error: BaseException | None = None) -> None:
        """Call ``on_success`` if there is no error, then mark the message as done."""
        if error is None and self.on_success is not None:
            self.on_success()
        super().finish(error)

    def size_error(self, nbytes: int) -> LayoutMismatch | None:
        """Return an error if the sender sent another size than this receive expects, or None."""
        if nbytes == self.nbytes:
            return None
        return LayoutMismatch(
            f"receive (tag {self.tag}): rank {self.peer} sent {nbytes} bytes, "
            f"but the tensor here has {self.nbytes}; both ranks must use the same size and dtype"
        )


class P2PQueues:
    """All incomplete messages of this rank. Only one thread may use this object at a time."""

    def __init__(self, outgoing: Rings, incoming: Rings, reader: CmaReader) -> None:
        self._incoming, self._read = tuple(incoming), reader
        self._sends = SendQueue(outgoing, reader.least_nbytes)
        self._lost: set[int] = set()  # sources from which nothing can be received any more
        self._posted: list[P2PWork] = []  # receives that no message has matched yet
        self._arriving: dict[int, P2PWork] = {}  # source -> message that is partly received
        self._unexpected: list[tuple[int, P2PWork]] = []

    def send(self, work: P2PWork, peer: int) -> None:
        """Queue a message to ``peer``, and send what is possible now."""
        self._sends.add(work, peer)
        self.progress()

    def post_receive(self, work: P2PWork) -> tuple[int, P2PWork] | None:
        """Return (source, work) of a matching unexpected message, or post the receive."""
        for index, (source, message) in enumerate(self._unexpected):
            if message.tag == work.tag and work.peer in (None, source):
                return self._unexpected.pop(index)
        self._posted.append(work)
        self.progress()
        return None

    def idle(self) -> bool:
        """Return whether no message is to be sent or received."""
        return self._sends.idle() and not (self._posted or self._arriving)

    def pending(self) -> Iterator[tuple[str, P2PWork]]:
        """Yield ("send" or "receive", work) of all messages that are not complete."""
        yield from (("send", work) for work in self._sends.pending())
        yield from (("receive", work) for work in (*self._posted, *self._arriving.values()))

    def is_partial(self, work: P2PWork) -> bool:
        """Return whether a part of a message was sent or received, or its address was sent."""
        return work.start > 0 or any(work is other for other in self._arriving.values())

    def remove(self, work: P2PWork) -> None:
        """Forget a message."""
        self._posted = [w for w in self._posted if w is not work]
        self._arriving = {s: w for s, w in self._arriving.items() if w is not work}
        self._sends.remove(work)

    def progress(self) -> bool:
        """Move every message as far as it goes; return whether any moved."""
        moved = self._sends.progress()
        for source, ring in enumerate(self._incoming):
            if ring is None or source in self._lost:
                continue
            if self._posted or source in self._arriving:
                moved |= self._receive_from(source, ring)
        return moved

    def _receive_from(self, source: int, ring: Ring) -> bool:
        moved = False
        while (cell := ring.peek()) is not None:
            work = self._arriving.get(source) or self._match(source, cell)
            if work is None:
                return moved
            self._arriving[source] = work
            error = self._copy_cell(work, cell, source)
            if error is not None:  # the cell is not released, so the send does not complete either
                self._stop_receiving_from(source, error)
                return True
            ring.release()
            moved = True
            if cell.start + max(cell.nbytes, 1) >= max(cell.total, 1):
                del self._arriving[source]
                work.finish(work.size_error(cell.total))
        return moved

    def _stop_receiving_from(self, source: int, error: FaultError) -> None:
        """Stop receiving from a rank, because the failed message blocks its ring.

        The current receive fails. But a receive from any source waits for another rank instead.
        """
        self._lost.add(source)
        work = self._arriving.pop(source)
        self._unexpected = [item for item in self._unexpected if item[1] is not work]
        if work.any_source:
            work.peer = None
            self._posted.insert(0, work)
        else:
            work.finish(error)

    def _copy_cell(self, work: P2PWork, cell: RingCell, source: int) -> FaultError | None:
        """Copy a cell, or the remote message, into the tensor if it fits. Return a read error."""
        if cell.start + cell.nbytes > work.nbytes:
            return None
        if not cell.remote_address:
            memmove(work.address + cell.start, cell.address, cell.nbytes)
            return None
        remote, nbytes, operation = cell.remote_address, cell.nbytes, f"receive (tag {cell.tag})"
        try:
            self._read(source, remote, target=work.address, nbytes=nbytes, operation=operation)
        except FaultError as error:
            return error
        return None

    def _match(self, source: int, cell: RingCell) -> P2PWork | None:
        """Return the posted receive that matches a message.

        If no receive matches, but one waits for a later message of this source, return a new work
        with a buffer for the unexpected message. If no receive waits for this source, return None.
        """
        end = 0.0
        for work in self._posted:
            if work.peer in (None, source):
                if work.tag == cell.tag:
                    self._posted.remove(work)
                    work.peer = source
                    return work
                end = work.end  # this receive waits for a later message; both get its timeout
        if not end:
            return None
        buffer = torch.empty(cell.total, dtype=torch.uint8)
        unexpected = P2PWork(buffer, cell.tag, peer=source, end=end)
        self._unexpected.append((source, unexpected))
        return unexpected


class SendQueue:
    """The messages that this rank sends, in order for each receiver. One thread at a time uses it.

    Receivers read messages of at least ``least_nbytes`` from the memory of this process. But very
    long messages go through the ring if there is a core for each rank.
    """

    def __init__(self, rings: Rings, least_nbytes: int) -> None:
        self._rings, self._least_nbytes = tuple(rings), least_nbytes
        crowded = len(self._rings) > usable_cores()
        self._most_nbytes = sys.maxsize if crowded else _PIPELINED_NBYTES
        self._queued: dict[int, deque[P2PWork]] = {}
        # receiver -> (cell number, work) of each message whose address was sent
        self._published: dict[int, deque[tuple[int, P2PWork]]] = {}

    def add(self, work: P2PWork, peer: int) -> None:
        """Queue a message after all earlier messages to the same rank."""
        self._queued.setdefault(peer, deque()).append(work)

    def idle(self) -> bool:
        """Return whether no message is to be sent."""
        return not (self._queued or self._published)

    def pending(self) -> Iterator[P2PWork]:
        """Yield all messages that are not complete."""
        for works in list(self._queued.values()):
            yield from list(works)
        for items in list(self._published.values()):
            yield from (work for _, work in list(items))

    def remove(self, work: P2PWork) -> None:
        """Forget a message."""
        for works in self._queued.values():
            if work in works:
                works.remove(work)
        for peer, items in self._published.items():
            self._published[peer] = deque(item for item in items if item[1] is not work)

    def progress(self) -> bool:
        """Move every message as far as it goes; return whether any moved."""
        moved = False
        for peer in list(self._published):
            moved |= self._finish_read(peer)
        for peer in list(self._queued):
            moved |= self._write(peer)
        return moved

    def _write(self, peer: int) -> bool:
        ring, works, moved = self._rings[peer], self._queued[peer], False
        while works and ring is not None:
            work = works[0]
            if self._least_nbytes <= work.nbytes <= self._most_nbytes:
                number = ring.write_address(work.tag, address=work.address, nbytes=work.nbytes)
                if number is None:
                    return moved
                work.start, moved = work.nbytes, True
                self._published.setdefault(peer, deque()).append((number, works.popleft()))
                continue
            start = ring.write(work.tag, address=work.address, nbytes=work.nbytes, start=work.start)
            moved |= start != work.start
            work.start = start
            if start < max(work.nbytes, 1):
                return moved
            works.popleft()
            work.finish()
        del self._queued[peer]
        return moved

    def _finish_read(self, peer: int) -> bool:
        """Finish the messages that a rank has read by address. Return whether there were any."""
        ring, items, moved = self._rings[peer], self._published[peer], False
        while items and ring is not None and ring.is_released(items[0][0]):
            items.popleft()[1].finish()
            moved = True
        if not items:
            del self._published[peer]
        return moved
