"""The messages of one rank that are under way, and the rings they go through.

A message that nobody has asked for stays with its sender, unless it is in the way of one that
somebody has: then it is kept aside. Messages of one sender and tag arrive in the order sent.

A long message does not go through its ring if the receiver can read it where it lies (``reading``):
the ring only says where, and the message is sent when it has been read. A very long one does, where
there are as many cores as ranks: then one end writes while the other reads.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from ctypes import memmove

import torch

from shoal.cores import usable_cores
from shoal.errors import FaultError
from shoal.wire.shm.parcel import Parcel
from shoal.wire.shm.reading import Reader
from shoal.wire.shm.ring import Cell, Ring

_PIPED_NBYTES = 2 << 20  # from here on a ring is faster, if each end has a core of its own


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
        self._out, self._in, self._read = tuple(outward), tuple(inward), reader
        crowded = len(self._out) > usable_cores()
        self._most_nbytes = sys.maxsize if crowded else _PIPED_NBYTES
        self._leaving: dict[int, deque[Parcel]] = {}
        self._offered: dict[int, deque[tuple[int, Parcel]]] = {}  # with the number of the cell
        self._awaited: list[Parcel] = []
        self._taking: dict[int, Parcel] = {}  # by source: the message whose cells are coming
        self._aside: list[tuple[int, Parcel]] = []

    def send(self, parcel: Parcel, peer: int) -> None:
        """Begin to send."""
        self._leaving.setdefault(peer, deque()).append(parcel)
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
        return not (self._awaited or self._leaving or self._offered or self._taking)

    def waiting(self) -> Iterator[tuple[str, Parcel]]:
        """All that is under way, and what is done with it."""
        for parcels in list(self._leaving.values()):
            yield from (("send", parcel) for parcel in list(parcels))
        for offers in list(self._offered.values()):
            yield from (("send", parcel) for _, parcel in list(offers))
        yield from (("receive", parcel) for parcel in (*self._awaited, *self._taking.values()))

    def begun(self, parcel: Parcel) -> bool:
        """Whether part of a message has moved and part has not, or its address was told."""
        return parcel.start > 0 or any(parcel is taken for taken in self._taking.values())

    def drop(self, parcel: Parcel) -> None:
        """Have no more to do with a message."""
        self._awaited = [p for p in self._awaited if p is not parcel]
        self._taking = {s: p for s, p in self._taking.items() if p is not parcel}
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
        for source, ring in enumerate(self._in):
            if ring is not None and (self._awaited or source in self._taking):
                moved |= self._pull(source, ring)
        return moved

    def _push(self, peer: int) -> bool:
        ring, waiting, moved = self._out[peer], self._leaving[peer], False
        while waiting and ring is not None:
            parcel = waiting[0]
            if self._read.least_nbytes <= parcel.nbytes <= self._most_nbytes:
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
        ring, offers, moved = self._out[peer], self._offered[peer], False
        while offers and ring is not None and ring.taken(offers[0][0]):
            offers.popleft()[1].finish()
            moved = True
        if not offers:
            del self._offered[peer]
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
                del self._taking[source]
                taking.finish(error)
                return True
            ring.take()
            moved = True
            if cell.start + max(cell.nbytes, 1) >= max(cell.total, 1):
                del self._taking[source]
                taking.finish(taking.misfit(cell.total))
        return moved

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
