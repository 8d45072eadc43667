"""One-way streams of messages between two ranks: a ring of cells for each ordered pair of ranks.

::

    byte 0         64       128
    +---------+--------+--------------------+------+------+------+
    | written |  read  | cell 0: head, data |  1   |  2   |  3   |
    +---------+--------+--------------------+------+------+------+

Only the sender counts ``written``, only the receiver counts ``read``, so they need no lock against
each other: ``written - read`` cells are full. A message longer than a cell is a run of cells. The
sender writes the first ones before the receiver has read all of them, so a message may be of any
length.
"""

from __future__ import annotations

import struct
from ctypes import memmove
from typing import NamedTuple

from shoal.wire.shm.memory.barrier import RankHeaders
from shoal.wire.shm.memory.segment import Segment

CELLS = 4
_COUNTS_NBYTES = 128  # the two counts, a cache line each
# tag, bytes of the message, position of this cell's bytes in it, address of the message or 0
_CELL_HEAD = struct.Struct("<qqqq")
_CELL_HEAD_NBYTES = 64
_MASK = 0x3FFFFFFF


def ring_nbytes(cell_nbytes: int) -> int:
    """Return the size of a ring whose cells hold ``cell_nbytes`` each."""
    return _COUNTS_NBYTES + CELLS * (_CELL_HEAD_NBYTES + cell_nbytes)


class RingCell(NamedTuple):
    """The content of the next unread cell of a ring."""

    tag: int
    total: int  # bytes of the whole message
    start: int  # position of this cell's bytes in the message
    address: int
    nbytes: int
    remote_address: int  # of the message in the sender's process, if it is to be read there; else 0


class Ring:
    """The ring at offset ``start`` of the segment, as one of its two ranks uses it."""

    def __init__(
        self, segment: Segment, start: int, *, cell_nbytes: int, headers: RankHeaders, other: int
    ) -> None:
        self._words, self._memory = headers.words, segment.memory
        self._written, self._read = start >> 2, (start + 64) >> 2
        self._cells = start + _COUNTS_NBYTES
        self._stride, self._cell_nbytes = _CELL_HEAD_NBYTES + cell_nbytes, cell_nbytes
        self._address, self._headers, self._other = segment.address, headers, other

    def write(self, tag: int, *, address: int, nbytes: int, start: int) -> int:
        """Write what fits of a message, from ``start`` on; return where the rest begins.

        A message without bytes still takes a cell: for it this returns 1 once it is written.
        """
        cell, end = self._cell_nbytes, max(nbytes, 1)
        while start < end and (at := self._free_cell()) is not None:
            count = min(cell, nbytes - start)
            _CELL_HEAD.pack_into(self._memory, at, tag, nbytes, start, 0)
            memmove(self._address + at + _CELL_HEAD_NBYTES, address + start, count)
            self._publish()
            start += max(count, 1)
        return start

    def write_address(self, tag: int, *, address: int, nbytes: int) -> int | None:
        """Write only the address of a message; return the cell's number, None if no cell is free.

        The message must stay unchanged until :meth:`is_released`.
        """
        at = self._free_cell()
        if at is None:
            return None
        _CELL_HEAD.pack_into(self._memory, at, tag, nbytes, 0, address)
        return self._publish()

    def is_released(self, number: int) -> bool:
        """Return whether the receiver has released a cell that holds an address."""
        return (self._words[self._read] - number) & _MASK < _MASK >> 1

    def _free_cell(self) -> int | None:
        """Return the offset of the next cell to write in the segment; None if all are full."""
        written = self._words[self._written]
        if (written - self._words[self._read]) & _MASK >= CELLS:
            return None
        return self._cells + (written % CELLS) * self._stride

    def _publish(self) -> int:
        """Show the receiver the cell just written; return its number, modulo 2**30."""
        self._words[self._written] = number = (self._words[self._written] + 1) & _MASK
        self._headers.ring(self._other)
        return number

    def peek(self) -> RingCell | None:
        """Return the next unread cell, if there is one."""
        read = self._words[self._read]
        if self._words[self._written] == read:
            return None
        at = self._cells + (read % CELLS) * self._stride
        tag, total, start, remote = _CELL_HEAD.unpack_from(self._memory, at)
        nbytes = total if remote else min(self._cell_nbytes, total - start)
        return RingCell(tag, total, start, self._address + at + _CELL_HEAD_NBYTES, nbytes, remote)

    def release(self) -> None:
        """Give the cell last peeked at back to the sender."""
        self._words[self._read] = (self._words[self._read] + 1) & _MASK
        self._headers.ring(self._other)
