"""One message between two ranks, while it is being sent or received.

The messages of one rank that are under way, and the rings they go through.

A message that nobody has asked for stays with its sender, unless it is in the way of one that
somebody has: then it is kept aside. Messages of one sender and tag arrive in the order sent.

A message that lies with its sender (``sending``) may no longer be readable, for the sender is gone
or has given up. Nothing behind it can be had either: that rank is lost to this one.

The messages of one rank that others have not taken yet.

A long message does not go through its ring if the receiver can read it where it lies (``reading``):
the ring only says where, and the message is sent when it has been read. A very long one does, where
there are as many cores as ranks: then one end writes while the other reads.
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
from shoal.wire.shm.backend.work import Work
from shoal.wire.shm.memory.cma import Reader
from shoal.wire.shm.memory.ring import Cell, Ring


class Parcel(Work):
    """A message under way.

    Args:
        flat: its numbers, contiguous.
        tag: must match.
        peer: the other rank, or None for any.
        end: when it must have arrived, on the monotonic clock.
        drive: called by who waits for the message, with the latest time; returns when it has
            arrived, or then.
    """

    def __init__(
        self,
        flat: Tensor,
        tag: int,
        *,
        peer: int | None,
        end: float,
        drive: Callable[[Parcel, float], None] | None = None,
    ) -> None:
        super().__init__([flat])
        self.flat, self.tag, self.peer, self._drive = flat, tag, peer, drive
        self.address, self.nbytes, self.start = flat.data_ptr(), flat.nbytes, 0
        self.end, self.finally_ = end, None
        self.from_anyone = peer is None

    finally_: Callable[[], None] | None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is sent or received, and raise what went wrong.

        Raises:
            ExchangeTimeout: not done within ``timeout``; it goes on.
        """
        seconds = timeout.total_seconds() if timeout else 0.0
        if not self._done and self._drive is not None:
            self._drive(self, time.monotonic() + seconds if seconds > 0 else math.inf)
            if not self._done:
                raise ExchangeTimeout(f"a message (tag {self.tag}) not done within {seconds:g} s")
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

    def misfit(self, nbytes: int) -> LayoutMismatch | None:
        """What is wrong if ``nbytes`` were sent; None if that is what is wanted."""
        if nbytes == self.nbytes:
            return None
        return LayoutMismatch(
            f"receive (tag {self.tag}): rank {self.peer} sent {nbytes} bytes, "
            f"but the tensor here has {self.nbytes}; both ends need the same size and type"
        )


class Mail:
    """Whatever moves or waits; to be used by one thread at a time.

    Args:
        outward: the ring to each other rank.
        inward: the ring from each other rank.
        reader: of the other ranks' memory.
    """

    def __init__(
        self, outward: Sequence[Ring | None], inward: Sequence[Ring | None], reader: Reader
    ) -> None:
        self._in, self._read = tuple(inward), reader
        self._sending = Sending(outward, reader.least_nbytes)
        self._lost: set[int] = set()  # from whom nothing can be had any more
        self._awaited: list[Parcel] = []
        self._taking: dict[int, Parcel] = {}  # by source: the message whose cells are coming
        self._aside: list[tuple[int, Parcel]] = []

    def send(self, parcel: Parcel, peer: int) -> None:
        """Begin to send."""
        self._sending.add(parcel, peer)
        self.progress()

    def expect(self, parcel: Parcel) -> tuple[int, Parcel] | None:
        """Begin to receive; or return the source and the message, if it was kept aside."""
        for index, (source, other) in enumerate(self._aside):
            if other.tag == parcel.tag and parcel.peer in (None, source):
                return self._aside.pop(index)
        self._awaited.append(parcel)
        self.progress()
        return None

    def idle(self) -> bool:
        """Whether nothing is under way."""
        return self._sending.idle() and not (self._awaited or self._taking)

    def waiting(self) -> Iterator[tuple[str, Parcel]]:
        """All that is under way, and what is done with it."""
        yield from (("send", parcel) for parcel in self._sending.waiting())
        yield from (("receive", parcel) for parcel in (*self._awaited, *self._taking.values()))

    def begun(self, parcel: Parcel) -> bool:
        """Whether part of a message has moved and part has not, or its address was told."""
        return parcel.start > 0 or any(parcel is taken for taken in self._taking.values())

    def drop(self, parcel: Parcel) -> None:
        """Have no more to do with a message."""
        self._awaited = [p for p in self._awaited if p is not parcel]
        self._taking = {s: p for s, p in self._taking.items() if p is not parcel}
        self._sending.drop(parcel)

    def progress(self) -> bool:
        """Move every message as far as it goes; whether any moved."""
        moved = self._sending.progress()
        for source, ring in enumerate(self._in):
            if ring is None or source in self._lost:
                continue
            if self._awaited or source in self._taking:
                moved |= self._pull(source, ring)
        return moved

    def _pull(self, source: int, ring: Ring) -> bool:
        moved = False
        while (cell := ring.peek()) is not None:
            taking = self._taking.get(source) or self._addressee(source, cell)
            if taking is None:
                return moved
            self._taking[source] = taking
            error = self._fill(taking, cell, source)
            if error is not None:  # not taken, so it is not sent either
                self._lose(source, error)
                return True
            ring.take()
            moved = True
            if cell.start + max(cell.nbytes, 1) >= max(cell.total, 1):
                del self._taking[source]
                taking.finish(taking.misfit(cell.total))
        return moved

    def _lose(self, source: int, error: FaultError) -> None:
        """Await nothing from a rank any more; who takes what anyone sends goes on waiting."""
        self._lost.add(source)
        taking = self._taking.pop(source)
        self._aside = [kept for kept in self._aside if kept[1] is not taking]
        if taking.from_anyone:
            taking.peer = None
            self._awaited.insert(0, taking)
        else:
            taking.finish(error)

    def _fill(self, taking: Parcel, cell: Cell, source: int) -> FaultError | None:
        """Copy what a cell holds, or tells of, to where it belongs, if that is long enough."""
        if cell.start + cell.nbytes > taking.nbytes:
            return None
        if not cell.there:
            memmove(taking.address + cell.start, cell.address, cell.nbytes)
            return None
        what = f"receive (tag {cell.tag})"
        try:
            self._read(source, cell.there, target=taking.address, nbytes=cell.nbytes, what=what)
        except FaultError as error:
            return error
        return None

    def _addressee(self, source: int, cell: Cell) -> Parcel | None:
        """Who waits for the message that begins in a cell; else room aside, if it is in the way."""
        end = 0.0
        for parcel in self._awaited:
            if parcel.peer in (None, source):
                if parcel.tag == cell.tag:
                    self._awaited.remove(parcel)
                    parcel.peer = source
                    return parcel
                end = parcel.end  # it is in the way, and has as long as who waits
        if not end:
            return None
        room = torch.empty(cell.total, dtype=torch.uint8)
        kept = Parcel(room, cell.tag, peer=source, end=end)
        self._aside.append((source, kept))
        return kept


_PIPED_NBYTES = 2 << 20  # from here on a ring is faster, if each end has a core of its own


class Sending:
    """Whatever leaves; to be used by one thread at a time.

    Args:
        rings: to each other rank.
        least_nbytes: of a message that is read where it lies.
    """

    def __init__(self, rings: Sequence[Ring | None], least_nbytes: int) -> None:
        self._rings, self._least_nbytes = tuple(rings), least_nbytes
        crowded = len(self._rings) > usable_cores()
        self._most_nbytes = sys.maxsize if crowded else _PIPED_NBYTES
        self._leaving: dict[int, deque[Parcel]] = {}
        self._offered: dict[int, deque[tuple[int, Parcel]]] = {}  # with the number of the cell

    def add(self, parcel: Parcel, peer: int) -> None:
        """Another one, behind those that leave for the same rank."""
        self._leaving.setdefault(peer, deque()).append(parcel)

    def idle(self) -> bool:
        """Whether there is none."""
        return not (self._leaving or self._offered)

    def waiting(self) -> Iterator[Parcel]:
        """All of them."""
        for parcels in list(self._leaving.values()):
            yield from list(parcels)
        for offers in list(self._offered.values()):
            yield from (parcel for _, parcel in list(offers))

    def drop(self, parcel: Parcel) -> None:
        """Have no more to do with a message."""
        for waiting in self._leaving.values():
            if parcel in waiting:
                waiting.remove(parcel)
        for peer, offers in self._offered.items():
            self._offered[peer] = deque(offer for offer in offers if offer[1] is not parcel)

    def progress(self) -> bool:
        """Move every message as far as it goes; whether any moved."""
        moved = False
        for peer in list(self._offered):
            moved |= self._settle(peer)
        for peer in list(self._leaving):
            moved |= self._push(peer)
        return moved

    def _push(self, peer: int) -> bool:
        ring, waiting, moved = self._rings[peer], self._leaving[peer], False
        while waiting and ring is not None:
            parcel = waiting[0]
            if self._least_nbytes <= parcel.nbytes <= self._most_nbytes:
                number = ring.offer(parcel.tag, address=parcel.address, nbytes=parcel.nbytes)
                if number is None:
                    return moved
                parcel.start, moved = parcel.nbytes, True
                self._offered.setdefault(peer, deque()).append((number, waiting.popleft()))
                continue
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

    def _settle(self, peer: int) -> bool:
        """Finish what a rank has read; whether it has read any."""
        ring, offers, moved = self._rings[peer], self._offered[peer], False
        while offers and ring is not None and ring.taken(offers[0][0]):
            offers.popleft()[1].finish()
            moved = True
        if not offers:
            del self._offered[peer]
        return moved
