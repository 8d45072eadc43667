"""Combine numbers among ranks that share memory: all_reduce, reduce, reduce_scatter.

A long message among three or more goes in two phases, each rank's share of work 1/n (``Pieces``).
Between two ranks, or for a short message, everyone combines everything: one meeting, no phase two.
Numbers in a shared bucket are combined where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from shoal.wire.shm.board import entitled
from shoal.wire.shm.bucket import Bucket, Span
from shoal.wire.shm.pieces import Pieces
from shoal.wire.shm.reduction import Reduction
from shoal.wire.shm.slots import ALIGN

_SHORT_NBYTES = 4 << 20  # of all ranks: to combine these everywhere costs less than to meet again


@lru_cache(maxsize=1024)
def _located(title: bytes, bucket: int, offset: int) -> bytes:
    """The title, with where in which bucket the numbers are."""
    return entitled(f"{title.decode().strip()} in place at {bucket}+{offset}")


class Combining(Pieces):
    """The collectives that combine numbers, given as flat contiguous tensors."""

    def all_reduce(self, title: bytes, flat: Tensor, how: Reduction) -> None:
        """Leave everyone's numbers, combined, in ``flat`` of everyone."""
        for bucket in self.buckets:
            span = bucket.span(flat)
            if span is not None:
                self._reduce_in_place(title, bucket, span, how)
                return
        short = min(_SHORT_NBYTES // self.size, self.slots.cached)
        if self.size == 2 or flat.nbytes <= short:
            self._reduce(title, flat, how, range(self.size))
        else:
            self._reduce_in_pieces(title, flat, how)

    def _reduce_in_place(self, title: bytes, bucket: Bucket, span: Span, how: Reduction) -> None:
        self.slots.next()
        self.board.begin(_located(title, self.buckets.index(bucket), span.offset))
        bucket.reduce(span, how)
        self.board.meet()

    def reduce(self, title: bytes, flat: Tensor, how: Reduction, *, root: int) -> None:
        """Leave everyone's numbers, combined, in ``flat`` of one rank."""
        self._reduce(title, flat, how, (root,))

    def _reduce(self, title: bytes, flat: Tensor, how: Reduction, readers: Sequence[int]) -> None:
        width, address = flat.element_size(), flat.data_ptr()
        only = len(readers) == 1 and readers[0] < 2  # the result goes over its own numbers
        own = only or self.size == 2  # read one's own numbers where they are
        gives = not only or self.rank not in readers
        for start, count in self._rounds(flat.numel(), self.slots.cached // width):
            if gives:
                self.slots.put(0, address + start * width, count * width)
            self._meet(start, title)
            if self.rank in readers and count:
                out = flat if count == flat.numel() else flat[start : start + count]
                how(out, self._sources(out, 0, own=own))

    def reduce_scatter(
        self, title: bytes, sources: Sequence[int], *, mine: Tensor, out: Tensor, how: Reduction
    ) -> None:
        """Combine what all ranks have for this rank into ``out``.

        Args:
            title: of the collective.
            sources: addresses of this rank's pieces, one for each rank.
            mine: its piece for itself, as numbers.
            out: where the result goes; may be ``mine``.
            how: to combine.
        """
        width, own = out.element_size(), self.size == 2
        share = self.slots.cached // (1 if own else self.size) // ALIGN * ALIGN
        at = 0 if own else share
        for start, count in self._rounds(out.numel(), share // width):
            for rank, source in enumerate(sources):
                if not own or rank != self.rank:
                    self.slots.put(rank * at, source + start * width, count * width)
            self._meet(start, title)
            if count:
                target, piece = out[start : start + count], mine[start : start + count]
                how(target, self._sources(piece, self.rank * at, own=own))
