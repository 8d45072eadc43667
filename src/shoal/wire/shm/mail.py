"""The messages of one rank that are under way, and the rings they go through.

A message that nobody has asked for stays with its sender, unless it is in the way of one that
somebody has: then it is kept aside. Messages of one sender and tag arrive in the order sent.

A message that lies with its sender (``sending``) may no longer be readable, for the sender is gone
or has given up. Nothing behind it can be had either: that rank is lost to this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import memmove

import torch

from shoal.errors import FaultError
from shoal.wire.shm.parcel import Parcel
from shoal.wire.shm.reading import Reader
from shoal.wire.shm.ring import Cell, Ring
from shoal.wire.shm.sending import Sending


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
