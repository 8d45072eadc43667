"""The data buffers in shared memory: slots for any message, and tensors that are reduced in place.

*Slots.* Each rank has two slots in the group's segment, used in turns::

    | headers | rank 0: slot 0, slot 1 | rank 1: slot 0, slot 1 | ... | rings |

A message is cut into rounds of at most one slot. While the other ranks still read what a rank wrote
in one round, it may write the next round into its other slot (see ``barrier`` for why two are
enough). More slots would be slower: what was written last is likely to be still in a cache. Copies
go by address, so neither ``requires_grad`` nor a type that torch cannot copy matters.

*Shared buffers.* A segment of its own with an equal part for each rank; a rank's tensor is its
part. To reduce it, each rank combines its share of the elements straight from all parts and writes
the result into all parts, block by block, so that a block is still in the cache when it is written.
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

_CACHED_VIEWS = 2048  # at most; the same few sizes come again and again
_ROUND_NBYTES = 1 << 20  # a core's cache should hold a round until it is read again
ALIGN = 64  # a cache line
TURNS = 2


class Slots:
    """The slots of a group, from offset ``start`` of the segment on, of ``nbytes`` each.

    Attributes:
        round_nbytes: the most that a round should copy.
        turn: which of each rank's two slots is used in this round.
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
        """Switch to the other slot, for the next round."""
        self.turn = (self.turn + 1) % TURNS

    def rounds(self, total: int, most: int) -> Iterator[tuple[int, int]]:
        """Cut ``total`` into rounds (start, count), each in the next slot; at least one round."""
        if total <= most:
            self.next()
            yield 0, total
            return
        for start in range(0, total, most):
            self.next()
            yield start, min(most, total - start)

    def address(self, rank: int) -> int:
        """Return the address in this process of a rank's slot of this round."""
        return self._base + (TURNS * rank + self.turn) * self.nbytes

    def _offset(self, rank: int) -> int:
        """Return the offset in the segment of a rank's slot of this round."""
        return self._start + (TURNS * rank + self.turn) * self.nbytes

    def put(self, at: int, source: int, nbytes: int) -> None:
        """Copy memory of this process into this rank's slot."""
        memmove(self.address(self.rank) + at, source, nbytes)

    def get(self, rank: int, at: int, *, target: int, nbytes: int) -> None:
        """Copy from a rank's slot into memory of this process."""
        memmove(target, self.address(rank) + at, nbytes)

    def part_nbytes(self, head: int = 0) -> int:
        """Return the size of one part of a slot, behind a head, with a part for each other rank."""
        return (self.nbytes - head) // max(self.size - 1, 1) // ALIGN * ALIGN

    def write_integers(self, integers: Sequence[int]) -> None:
        """Write 64-bit integers at the beginning of this rank's slot."""
        struct.pack_into(f"={len(integers)}q", self._memory, self._offset(self.rank), *integers)

    def read_integers(self, rank: int, count: int) -> list[int]:
        """Return the first ``count`` 64-bit integers of a rank's slot."""
        begin = self._offset(rank)
        return self._memory[begin : begin + 8 * count].cast("q").tolist()

    def view(self, rank: int, at: int, *, numel: int, dtype: torch.dtype) -> Tensor:
        """Return part of a rank's slot as a tensor."""
        key = self._offset(rank) + at, numel, dtype
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _CACHED_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):
                view = self._bytes[key[0] : key[0] + numel * dtype.itemsize].view(dtype)
            self._views[key] = view
        return view

    def views(self, own: Tensor, at: int, *, use_own: bool) -> list[Tensor]:
        """Return each rank's elements, in its slot; for this rank ``own`` itself if ``use_own``."""
        numel, dtype = own.numel(), own.dtype
        return [
            own if use_own and rank == self.rank else self.view(rank, at, numel=numel, dtype=dtype)
            for rank in range(self.size)
        ]


def tensor_at(address: int, nbytes: int) -> Tensor:
    """Return memory of this process as a tensor of bytes, which does not keep it alive."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((c_char * nbytes).from_address(address), dtype=torch.uint8)


def share_numel(numel: int, ranks: int, *, width: int) -> int:
    """Return how many of ``numel`` elements each rank combines: 1/n, in whole cache lines.

    >>> share_numel(40, 3, width=4)
    16
    """
    grain = ALIGN // width
    return -(-numel // ranks // grain) * grain


def share_range(rank: int, share: int, *, numel: int) -> tuple[int, int]:
    """Return begin and end of the elements that a rank combines.

    >>> [share_range(rank, 16, numel=40) for rank in range(3)]
    [(0, 16), (16, 32), (32, 40)]
    """
    return min(rank * share, numel), min((rank + 1) * share, numel)


def part_index(sender: int, receiver: int) -> int:
    """Return which part of the sender's slot is for the receiver; the sender itself has none."""
    return receiver - (receiver > sender)


_BLOCK_NBYTES = 256 << 10  # of each rank: the blocks of some ranks together fit a core's own cache
_CACHED_RANGES = 64


class SharedRange(NamedTuple):
    """Elements at the same position in the part of each rank."""

    offset: int  # bytes from the beginning of the part
    numel: int
    dtype: torch.dtype


class SharedBuffer:
    """One tensor for each rank, in memory that all ranks of the node map."""

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
        """Return the position of a tensor, if it lies in this rank's part."""
        address = flat.data_ptr()
        if not self.begin <= address < self.end:
            return None
        return SharedRange(address - self.begin, flat.numel(), flat.dtype)

    def reduce(self, elements: SharedRange, op: Reduction) -> None:
        """Combine this rank's share of the elements for all ranks; others combine theirs."""
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
        """Return blocks of this rank's share; each holds the same elements of every rank."""
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
    """Share a new segment with a part of ``nbytes`` for each of ``size`` ranks; rank 0 creates it.

    ``key`` of the store must not be used for another buffer.
    """
    part = segments.round_to_pages(max(nbytes, 1))
    mapped = [f"{key}/mapped/{other}" for other in range(size)]
    if rank == 0:
        with closing(segments.create(part * size)) as offer:
            segment = offer.map()
            store.set(key, json.dumps([offer.path, offer.nbytes]))
            store.set(mapped[0], "1")
            read_all(store, mapped)  # returns when all ranks have mapped it
    else:
        path, total = json.loads(store.get(key))
        segment = segments.map_from(path, total)
        store.set(mapped[rank], "1")
    return SharedBuffer(segment, part, rank=rank, size=size)
