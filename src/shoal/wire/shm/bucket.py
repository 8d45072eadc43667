"""Tensors that live in memory all ranks of a host can see, so that combining them copies nothing.

A bucket is one segment with an equal part for each rank; a rank's tensor is its part. To reduce it,
each rank combines its share of the numbers straight from everyone's part and writes the result into
everyone's part, block by block, so that a block is still in the cache when it is written out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal.wire.shm import segment as segments
from shoal.wire.shm.flat import ordinary
from shoal.wire.shm.reduction import Reduction
from shoal.wire.shm.segment import Segment
from shoal.wire.shm.slots import fair_share, share_of
from shoal.wire.shm.storing import read_all

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
