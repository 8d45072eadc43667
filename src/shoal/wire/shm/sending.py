"""The messages of one rank that others have not taken yet.

A long message does not go through its ring if the receiver can read it where it lies (``reading``):
the ring only says where, and the message is sent when it has been read. A very long one does, where
there are as many cores as ranks: then one end writes while the other reads.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence

from shoal.cores import usable_cores
from shoal.wire.shm.parcel import Parcel
from shoal.wire.shm.ring import Ring

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
