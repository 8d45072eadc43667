"""Where data lies in a group's segment, and how it is copied in and out.

Each rank has two slots, used in turns: a message is cut into rounds of at most one slot, and
while the others still read what a rank wrote in one round, it may write the next (see ``board``).
No more than two, for what was written last is likely to be still in a cache. Copies go by address:
a tensor that requires grad, or a type torch cannot copy, makes no difference.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import memmove

import torch
from torch import Tensor

from shoal.wire.shm.flat import ordinary
from shoal.wire.shm.segment import Segment

_VIEWS = 2048  # kept at most; the same few sizes come again and again
_CACHED_NBYTES = 1 << 20  # of a round that a core's cache should hold until it is read again
ALIGN = 64
TURNS = 2


class Slots:
    """The slots of a group.

    Args:
        segment: shared by the group.
        start: of the first slot, in bytes.
        nbytes: of one slot; a multiple of ``ALIGN``.
        rank: the rank in whose turn slots are handed out.
    """

    def __init__(self, segment: Segment, start: int, *, nbytes: int, rank: int) -> None:
        self.nbytes, self.rank = nbytes, rank
        self.cached = min(nbytes, _CACHED_NBYTES)
        self._base, self._start = segment.address + start, start
        self._memory = memoryview(segment.memory)
        with ordinary():
            self._bytes = torch.frombuffer(segment.memory, dtype=torch.uint8)
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self.turn = 0

    def next(self) -> None:
        """Begin another round: with the next slot."""
        self.turn = (self.turn + 1) % TURNS

    def offset(self, rank: int) -> int:
        """Where a rank's slot of this round begins in the segment."""
        return self._start + (TURNS * rank + self.turn) * self.nbytes

    def address(self, rank: int) -> int:
        """Where a rank's slot of this round begins in this process."""
        return self._base + (TURNS * rank + self.turn) * self.nbytes

    def put(self, at: int, source: int, nbytes: int) -> None:
        """Copy memory of this process into this rank's slot."""
        memmove(self.address(self.rank) + at, source, nbytes)

    def get(self, rank: int, at: int, *, target: int, nbytes: int) -> None:
        """Copy from a rank's slot into memory of this process."""
        memmove(target, self.address(rank) + at, nbytes)

    def share(self, ranks: int, head: int = 0) -> int:
        """Bytes of a slot, behind its head, for one rank, when each other rank gets its own."""
        return (self.nbytes - head) // max(ranks - 1, 1) // ALIGN * ALIGN

    def tell(self, integers: Sequence[int]) -> None:
        """Write 64-bit integers at the beginning of this rank's slot."""
        begin = self.offset(self.rank)
        struct.pack_into(f"={len(integers)}q", self._memory, begin, *integers)

    def integers(self, rank: int, count: int) -> list[int]:
        """The first ``count`` 64-bit integers of a rank's slot."""
        begin = self.offset(rank)
        return self._memory[begin : begin + 8 * count].cast("q").tolist()

    def view(self, rank: int, at: int, *, numel: int, dtype: torch.dtype) -> Tensor:
        """Part of a rank's slot as numbers."""
        key = self.offset(rank) + at, numel, dtype
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            begin = key[0]
            with ordinary():
                found = self._bytes[begin : begin + numel * dtype.itemsize].view(dtype)
            self._views[key] = found
        return found


def fair_share(numel: int, ranks: int, *, width: int) -> int:
    """How many of ``numel`` numbers a rank combines, when each does 1/n: whole lines of memory.

    >>> fair_share(40, 3, width=4)
    16
    """
    grain = ALIGN // width
    return -(-numel // ranks // grain) * grain


def share_of(rank: int, share: int, *, numel: int) -> tuple[int, int]:
    """From where to where a rank combines, when each does as much as there is, up to its share.

    >>> [share_of(rank, 16, numel=40) for rank in range(3)]
    [(0, 16), (16, 32), (32, 40)]
    """
    return min(rank * share, numel), min((rank + 1) * share, numel)


def place(giver: int, taker: int) -> int:
    """Which part of the giver's slot is the taker's, when none is for the giver itself."""
    return taker - (taker > giver)
