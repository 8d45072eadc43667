"""A ring of cells carries messages from one rank to another. Each ordered pair has one ring.

::

    byte 0         64       128
    +---------+--------+--------------------+------+------+------+
    | written |  read  | cell 0: head, data |  1   |  2   |  3   |
    +---------+--------+--------------------+------+------+------+

Only the sender increments ``written`` and only the receiver increments ``read``, so they need no
lock. The number of full cells is ``written - read``. A message longer than a cell takes several
cells. The sender reuses cells that the receiver has read, so a message may be longer than the ring.
"""

from __future__ import annotations

import struct
from ctypes import memmove
from typing import NamedTuple

from shoal.wire.shm.memory.barrier import RankHeaders
from shoal.wire.shm.memory.segment import Segment

CELLS = 4
_COUNTS_NBYTES = 128  # the two counters are each in their own cache line
# The fields are those of RingCell: tag, total, start, and remote_address or 0.
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
    address: int  # address of this cell's bytes in this process
    nbytes: int  # bytes of this cell, or of the whole message if remote_address is not 0
    remote_address: int  # of the message in the sender's process, or 0 if the cell has its bytes


class Ring:
    """The ring at offset ``start`` of the segment, between this rank and the rank ``other``."""

    def __init__(
        self, segment: Segment, start: int, *, cell_nbytes: int, headers: RankHeaders, other: int
    ) -> None:
        self._words, self._memory = headers.words, segment.memory
        self._written, self._read = start >> 2, (start + 64) >> 2
        self._cells = start + _COUNTS_NBYTES
        self._stride, self._cell_nbytes = _CELL_HEAD_NBYTES + cell_nbytes, cell_nbytes
        self._address, self._headers, self._other = segment.address, headers, other

    def write(self, tag: int, *, address: int, nbytes: int, start: int) -> int:
        """Write a message from byte ``start`` on, while cells are free, and return the new start.

        A message of 0 bytes takes one cell, and its new start is 1.
        """
        cell, end = self._cell_nbytes, max(nbytes, 1)
        while start < end and (offset := self._free_cell()) is not None:
            count = min(cell, nbytes - start)
            _CELL_HEAD.pack_into(self._memory, offset, tag, nbytes, start, 0)
            memmove(self._address + offset + _CELL_HEAD_NBYTES, address + start, count)
            self._publish()
            start += max(count, 1)
        return start

    def write_address(self, tag: int, *, address: int, nbytes: int) -> int | None:
        """Write only the address of a message, and return the cell's number or None.

        None means that no cell is free. The message must not change until :meth:`is_released`
        returns True for the number.
        """
        offset = self._free_cell()
        if offset is None:
            return None
        _CELL_HEAD.pack_into(self._memory, offset, tag, nbytes, 0, address)
        return self._publish()

    def is_released(self, number: int) -> bool:
        """Return whether the receiver has released the cell with this number."""
        return (self._words[self._read] - number) & _MASK < _MASK >> 1

    def _free_cell(self) -> int | None:
        """Return the offset, in the segment, of the next free cell, or None if all are full."""
        written = self._words[self._written]
        if (written - self._words[self._read]) & _MASK >= CELLS:
            return None
        return self._cells + (written % CELLS) * self._stride

    def _publish(self) -> int:
        """Make the cell just written visible to the receiver. Return its number modulo 2**30."""
        self._words[self._written] = number = (self._words[self._written] + 1) & _MASK
        self._headers.ring_bell(self._other)
        return number

    def peek(self) -> RingCell | None:
        """Return the next unread cell, or None if all cells are read."""
        read = self._words[self._read]
        if self._words[self._written] == read:
            return None
        offset = self._cells + (read % CELLS) * self._stride
        tag, total, start, remote = _CELL_HEAD.unpack_from(self._memory, offset)
        nbytes = total if remote else min(self._cell_nbytes, total - start)
        address = self._address + offset + _CELL_HEAD_NBYTES
        return RingCell(tag, total, start, address, nbytes, remote)

    def release(self) -> None:
        """Give the cell that :meth:`peek` returned back to the sender."""
        self._words[self._read] = (self._words[self._read] + 1) & _MASK
        self._headers.ring_bell(self._other)
