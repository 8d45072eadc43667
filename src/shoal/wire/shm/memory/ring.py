"""One-way streams of messages between two ranks: a ring of cells for every ordered pair.

The sender alone counts what it wrote, the receiver alone what it has read, so neither needs a lock
against the other. A message longer than a cell is a run of cells; it begins in one ring before the
receiver has made room for all of it, so its length is bounded by nothing.
"""

from __future__ import annotations

import struct
from ctypes import memmove
from typing import NamedTuple

from shoal.wire.shm.memory.barrier import Lines
from shoal.wire.shm.memory.segment import Segment

CELLS = 4
_HEAD_NBYTES = 128  # the two counts, a cache line each
# tag, bytes of the message, where this cell's bytes begin in it; or where the message lies
_CELL_HEAD = struct.Struct("<qqqq")
_CELL_HEAD_NBYTES = 64
_MASK = 0x3FFFFFFF


def ring_nbytes(cell_nbytes: int) -> int:
    """Bytes of a ring whose cells hold ``cell_nbytes`` each."""
    return _HEAD_NBYTES + CELLS * (_CELL_HEAD_NBYTES + cell_nbytes)


class Cell(NamedTuple):
    """What the next unread cell of a ring holds."""

    tag: int
    total: int  # bytes of the whole message
    start: int  # of this cell's bytes in the message
    address: int
    nbytes: int
    there: int  # where the sender has the message, if it is to be read there; else 0


class Ring:
    """The ring from one rank to another, as one of the two uses it.

    Args:
        segment: shared by the group.
        start: where the ring begins in it.
        cell_nbytes: what a cell holds.
        lines: to ring the bell of the other.
        other: the other rank.
    """

    def __init__(
        self, segment: Segment, start: int, *, cell_nbytes: int, lines: Lines, other: int
    ) -> None:
        self._words, self._memory = lines.words, segment.memory
        self._written, self._read = start >> 2, (start + 64) >> 2
        self._cells = start + _HEAD_NBYTES
        self._stride, self._cell_nbytes = _CELL_HEAD_NBYTES + cell_nbytes, cell_nbytes
        self._address, self._lines, self._other = segment.address, lines, other

    def write(self, tag: int, *, address: int, nbytes: int, start: int) -> int:
        """Write what fits of a message, from ``start`` on; return where the rest begins.

        A message without bytes still takes a cell; ``start`` is then 0, and 1 when it is written.
        """
        cell, end = self._cell_nbytes, max(nbytes, 1)
        while start < end and (at := self._free()) is not None:
            count = min(cell, nbytes - start)
            _CELL_HEAD.pack_into(self._memory, at, tag, nbytes, start, 0)
            memmove(self._address + at + _CELL_HEAD_NBYTES, address + start, count)
            self._publish()
            start += max(count, 1)
        return start

    def offer(self, tag: int, *, address: int, nbytes: int) -> int | None:
        """Write where a message lies; return the cell's number, or None if there is no room."""
        at = self._free()
        if at is None:
            return None
        _CELL_HEAD.pack_into(self._memory, at, tag, nbytes, 0, address)
        return self._publish()

    def taken(self, number: int) -> bool:
        """Whether the receiver has given back a cell that was offered."""
        return (self._words[self._read] - number) & _MASK < _MASK >> 1

    def _free(self) -> int | None:
        """Where the next cell to write begins in the segment; None if all are full."""
        written = self._words[self._written]
        if (written - self._words[self._read]) & _MASK >= CELLS:
            return None
        return self._cells + (written % CELLS) * self._stride

    def _publish(self) -> int:
        """Let the receiver see the cell just written; how many have been, counted in a circle."""
        self._words[self._written] = number = (self._words[self._written] + 1) & _MASK
        self._lines.ring(self._other)
        return number

    def peek(self) -> Cell | None:
        """The next unread cell, if there is one."""
        read = self._words[self._read]
        if self._words[self._written] == read:
            return None
        at = self._cells + (read % CELLS) * self._stride
        tag, total, start, there = _CELL_HEAD.unpack_from(self._memory, at)
        nbytes = total if there else min(self._cell_nbytes, total - start)
        return Cell(tag, total, start, self._address + at + _CELL_HEAD_NBYTES, nbytes, there)

    def take(self) -> None:
        """Give the cell last peeked at back to the sender."""
        self._words[self._read] = (self._words[self._read] + 1) & _MASK
        self._lines.ring(self._other)
