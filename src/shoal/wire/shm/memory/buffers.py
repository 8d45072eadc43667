"""Where data lies in a group's segment, and how it is copied in and out.

Each rank has two slots, used in turns: a message is cut into rounds of at most one slot, and
while the others still read what a rank wrote in one round, it may write the next (see ``board``).
No more than two, for what was written last is likely to be still in a cache. Copies go by address:
a tensor that requires grad, or a type torch cannot copy, makes no difference.

Tensors that live in memory all ranks of a host can see, so that combining them copies nothing.

A bucket is one segment with an equal part for each rank; a rank's tensor is its part. To reduce it,
each rank combines its share of the numbers straight from everyone's part and writes the result into
everyone's part, block by block, so that a block is still in the cache when it is written out.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from ctypes import memmove
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal.wire.shm.memory import segment as segments
from shoal.wire.shm.memory.peers import read_all
from shoal.wire.shm.memory.reduce_ops import Reduction, ordinary
from shoal.wire.shm.memory.segment import Segment

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


_BLOCK_NBYTES = 256 << 10  # of each rank: some ranks' blocks together fit a core's own cache
_SPANS = 64


class Span(NamedTuple):
    """Where numbers lie in the part of any rank."""

    offset: int  # bytes from the beginning of the part
    numel: int
    dtype: torch.dtype


class Bucket:
    """One shared tensor a rank.

    Args:
        segment: holds the parts.
        part_nbytes: of each rank's part.
        rank: of this process among those who share.
        size: how many share.
    """

    def __init__(self, segment: Segment, part_nbytes: int, *, rank: int, size: int) -> None:
        with ordinary():
            whole = torch.frombuffer(segment.memory, dtype=torch.uint8)
            self._parts = [whole[r * part_nbytes : (r + 1) * part_nbytes] for r in range(size)]
        self.rank, self.size = rank, size
        self.begin = segment.address + rank * part_nbytes
        self.end = self.begin + part_nbytes
        self._blocks: dict[Span, list[tuple[Tensor, ...]]] = {}

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """This rank's tensor."""
        with ordinary():
            return self._parts[self.rank][: numel * dtype.itemsize].view(dtype)

    def span(self, flat: Tensor) -> Span | None:
        """Where a tensor lies, if it lies in this rank's part."""
        address = flat.data_ptr()
        if not self.begin <= address < self.end:
            return None
        return Span(address - self.begin, flat.numel(), flat.dtype)

    def reduce(self, span: Span, how: Reduction) -> None:
        """Combine this rank's share of a span, for all ranks; others do theirs meanwhile."""
        for first, *others in self._share(span):
            how(first, (first, *others))
            for other in others:
                other.copy_(first)

    def _share(self, span: Span) -> Sequence[tuple[Tensor, ...]]:
        found = self._blocks.get(span)
        if found is None:
            if len(self._blocks) >= _SPANS:
                self._blocks.clear()
            with ordinary():
                found = self._blocks[span] = list(self._cut(span))
        return found

    def _cut(self, span: Span) -> Sequence[tuple[Tensor, ...]]:
        width = span.dtype.itemsize
        share = fair_share(span.numel, self.size, width=width)
        begin, end = share_of(self.rank, share, numel=span.numel)
        if begin == end:
            return ()
        start, stop = span.offset + begin * width, span.offset + end * width
        mine = [part[start:stop].view(span.dtype) for part in self._parts]
        block = _BLOCK_NBYTES // width
        cut = [part.split(block) for part in mine]  # type: ignore[no-untyped-call]
        return list(zip(*cut, strict=True))


def make_bucket(store: Store, key: str, nbytes: int, *, rank: int, size: int) -> Bucket:
    """Share a new segment with a part of ``nbytes`` for each of ``size`` ranks.

    Args:
        store: all of them see.
        key: no other bucket has.
        nbytes: of a part.
        rank: of this process among them; 0 makes the segment.
        size: how many.
    """
    part = segments.rounded(max(nbytes, 1))
    mapped = [f"{key}/mapped/{other}" for other in range(size)]
    if rank == 0:
        offer = segments.make(part * size)
        try:
            segment = segments.map_own(offer)
            store.set(key, json.dumps([offer.path, offer.nbytes]))
            store.set(mapped[0], "1")
            read_all(store, mapped)  # until all have it
        finally:
            offer.withdraw()
    else:
        path, total = json.loads(store.get(key))
        segment = segments.map_from(path, total)
        store.set(mapped[rank], "1")
    return Bucket(segment, part, rank=rank, size=size)
