"""The buffers in shared memory are slots for any message, and tensors that are reduced in place.

*Slots.* Each rank has two slots in the segment of the group and uses them in turns::

    | headers | rank 0: slot 0, slot 1 | rank 1: slot 0, slot 1 | ... | rings |

A message is divided into rounds of at most one slot. While the other ranks still read what a rank
wrote in one round, it may write the next round into its other slot (``barrier`` explains why two
slots are enough). More slots would be slower, because memory that was used recently is still in a
cache. Bytes are copied by address, so tensors with ``requires_grad`` and all dtypes can be copied.

*Shared buffers.* A shared buffer is a segment with a part for each rank. The tensor of a rank is
its part. To reduce the tensors, each rank combines its share of the elements. It reads this share
from all parts and writes the result into all parts, in blocks that fit into the cache.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing
from ctypes import c_char, memmove
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal.wire.shm.memory import segment as segments
from shoal.wire.shm.memory.peers import read_all
from shoal.wire.shm.memory.reduce_ops import Reduction
from shoal.wire.shm.memory.segment import Segment

_CACHED_VIEWS = 2048  # the most views kept; programs use the same few sizes again and again
_ROUND_NBYTES = 1 << 20  # so small that a round stays in the cache until it is read
ALIGN = 64  # bytes of a cache line
TURNS = 2  # slots of each rank


class Slots:
    """The slots of all ranks, which begin at offset ``start`` of the segment.

    Each slot has ``nbytes`` bytes.

    Attributes:
        round_nbytes: the most bytes that a rank should write in a round.
        turn: the index (0 or 1) of the slot that each rank uses in this round.
    """

    def __init__(self, segment: Segment, start: int, *, nbytes: int, rank: int, size: int) -> None:
        self.nbytes, self.rank, self.size = nbytes, rank, size
        self.round_nbytes = min(nbytes, _ROUND_NBYTES)
        self._base, self._start = segment.address + start, start
        self._memory = memoryview(segment.memory)
        with torch.inference_mode(False):
            self._bytes = torch.frombuffer(segment.memory, dtype=torch.uint8)
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self.turn = 0

    def next(self) -> None:
        """Begin the next round, which uses the other slot of each rank."""
        self.turn = (self.turn + 1) % TURNS

    def rounds(self, total: int, most: int) -> Iterator[tuple[int, int]]:
        """Call :meth:`next` and yield (start, count) for each round of at most ``most``."""
        if total <= most:
            self.next()
            yield 0, total
            return
        for start in range(0, total, most):
            self.next()
            yield start, min(most, total - start)

    def address(self, rank: int) -> int:
        """Return the address, in this process, of the slot that a rank uses in this round."""
        return self._base + (TURNS * rank + self.turn) * self.nbytes

    def _offset(self, rank: int) -> int:
        """Return the offset, in the segment, of the slot that a rank uses in this round."""
        return self._start + (TURNS * rank + self.turn) * self.nbytes

    def put(self, offset: int, source: int, nbytes: int) -> None:
        """Copy from the address ``source`` into this rank's slot, at ``offset``."""
        memmove(self.address(self.rank) + offset, source, nbytes)

    def get(self, rank: int, offset: int, *, target: int, nbytes: int) -> None:
        """Copy from a rank's slot, at ``offset``, to the address ``target``."""
        memmove(target, self.address(rank) + offset, nbytes)

    def part_nbytes(self, head: int = 0) -> int:
        """Return the bytes of a part if the slot has a head, then a part for each other rank."""
        return (self.nbytes - head) // max(self.size - 1, 1) // ALIGN * ALIGN

    def write_integers(self, integers: Sequence[int]) -> None:
        """Write 64-bit integers at the beginning of this rank's slot."""
        struct.pack_into(f"={len(integers)}q", self._memory, self._offset(self.rank), *integers)

    def read_integers(self, rank: int, count: int) -> list[int]:
        """Return the first ``count`` 64-bit integers of a rank's slot."""
        begin = self._offset(rank)
        return self._memory[begin : begin + 8 * count].cast("q").tolist()

    def view(self, rank: int, offset: int, *, numel: int, dtype: torch.dtype) -> Tensor:
        """Return ``numel`` elements of a rank's slot, from byte ``offset`` on, as a tensor view."""
        key = self._offset(rank) + offset, numel, dtype
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _CACHED_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):
                view = self._bytes[key[0] : key[0] + numel * dtype.itemsize].view(dtype)
            self._views[key] = view
        return view

    def views(self, own: Tensor, offset: int, *, use_own: bool) -> list[Tensor]:
        """Return a view like ``own`` of each slot. With ``use_own``, this rank's is ``own``."""
        return [
            own
            if use_own and rank == self.rank
            else self.view(rank, offset, numel=own.numel(), dtype=own.dtype)
            for rank in range(self.size)
        ]


def tensor_at(address: int, nbytes: int) -> Tensor:
    """Return a uint8 tensor of this memory. The tensor does not keep the memory alive."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((c_char * nbytes).from_address(address), dtype=torch.uint8)


def share_numel(numel: int, ranks: int, *, width: int) -> int:
    """Return how many elements each rank combines, which is 1/n rounded up to cache lines.

    >>> share_numel(40, 3, width=4)
    16
    """
    grain = ALIGN // width
    return -(-numel // ranks // grain) * grain


def share_range(rank: int, share: int, *, numel: int) -> tuple[int, int]:
    """Return the indices (begin, end) of the elements that a rank combines.

    >>> [share_range(rank, 16, numel=40) for rank in range(3)]
    [(0, 16), (16, 32), (32, 40)]
    """
    return min(rank * share, numel), min((rank + 1) * share, numel)


def part_index(sender: int, receiver: int) -> int:
    """Return the index of the receiver's part in the sender's slot, which skips the sender."""
    return receiver - (receiver > sender)


_BLOCK_NBYTES = 256 << 10  # the blocks of a few ranks together fit into the cache of a core
_CACHED_RANGES = 64


class SharedRange(NamedTuple):
    """The position of a tensor in a shared buffer, which is the same in the part of each rank."""

    offset: int  # bytes from the beginning of the part
    numel: int
    dtype: torch.dtype


class SharedBuffer:
    """A segment with one tensor for each rank of the node. Every rank can access all tensors."""

    def __init__(self, segment: Segment, part_nbytes: int, *, rank: int, size: int) -> None:
        with torch.inference_mode(False):
            whole = torch.frombuffer(segment.memory, dtype=torch.uint8)
            self._parts = [whole[r * part_nbytes : (r + 1) * part_nbytes] for r in range(size)]
        self.rank, self.size, self.begin = rank, size, segment.address + rank * part_nbytes
        self.end = self.begin + part_nbytes
        self._blocks: dict[SharedRange, list[tuple[Tensor, ...]]] = {}

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return this rank's tensor."""
        with torch.inference_mode(False):
            return self._parts[self.rank][: numel * dtype.itemsize].view(dtype)

    def locate(self, flat: Tensor) -> SharedRange | None:
        """Return the position of a tensor that begins in this rank's part, or None for others."""
        address = flat.data_ptr()
        if not self.begin <= address < self.end:
            return None
        return SharedRange(address - self.begin, flat.numel(), flat.dtype)

    def reduce(self, elements: SharedRange, op: Reduction) -> None:
        """Combine this rank's share of the elements, and write the result to all ranks' tensors."""
        blocks = self._blocks.get(elements)
        if blocks is None:
            if len(self._blocks) >= _CACHED_RANGES:
                self._blocks.clear()
            with torch.inference_mode(False):
                blocks = self._blocks[elements] = self._split(elements)
        for first, *others in blocks:
            op(first, (first, *others))
            for other in others:
                other.copy_(first)

    def _split(self, elements: SharedRange) -> list[tuple[Tensor, ...]]:
        """Return the blocks of this rank's share. A block has one view of each rank's tensor."""
        width = elements.dtype.itemsize
        share = share_numel(elements.numel, self.size, width=width)
        begin, end = share_range(self.rank, share, numel=elements.numel)
        if begin == end:
            return []
        start, stop = elements.offset + begin * width, elements.offset + end * width
        shares = [part[start:stop].view(elements.dtype) for part in self._parts]
        block = _BLOCK_NBYTES // width
        return list(zip(*(x.split(block) for x in shares), strict=True))  # type: ignore[no-untyped-call]


def share_buffer(store: Store, key: str, nbytes: int, *, rank: int, size: int) -> SharedBuffer:
    """Create (on rank 0) or map a segment with a part of at least ``nbytes`` for each rank.

    All ``size`` ranks must call this function. Each buffer needs a new ``key`` in the store.
    """
    part = segments.round_to_pages(max(nbytes, 1))
    mapped = [f"{key}/mapped/{other}" for other in range(size)]
    if rank == 0:
        with closing(segments.create(part * size)) as offer:
            segment = offer.map()
            store.set(key, json.dumps([offer.path, offer.nbytes]))
            store.set(mapped[0], "1")
            read_all(store, mapped)  # returns when all ranks have mapped the segment
    else:
        path, total = json.loads(store.get(key))
        segment = segments.map_from(path, total)
        store.set(mapped[rank], "1")
    return SharedBuffer(segment, part, rank=rank, size=size)
