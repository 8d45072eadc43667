"""Combine numbers among ranks that share memory: all_reduce, reduce, reduce_scatter.

A long message among three or more goes in two phases, each rank's share of work 1/n; between two
ranks, or if it is short, everyone combines everything (``prepared``). Numbers in a shared bucket
are combined where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from shoal.wire.shm.board import entitled
from shoal.wire.shm.bucket import Bucket, Span
from shoal.wire.shm.prepared import Preparing, Round, copy
from shoal.wire.shm.reduction import Reduction
from shoal.wire.shm.slots import ALIGN


@lru_cache(maxsize=1024)
def _located(title: bytes, bucket: int, offset: int) -> bytes:
    """The title, with where in which bucket the numbers are."""
    return entitled(f"{title.decode().strip()} in place at {bucket}+{offset}")


class Combining(Preparing):
    """The collectives that combine numbers, given as flat contiguous tensors."""

    def all_reduce(self, title: bytes, flat: Tensor, how: Reduction) -> None:
        """Leave everyone's numbers, combined, in ``flat`` of everyone."""
        for bucket in self.buckets:
            span = bucket.span(flat)
            if span is not None:
                self._reduce_in_place(title, bucket, span, how)
                return
        rounds = self._prepared(title, flat, how)
        if len(rounds) == 1:
            self._reduce_at_once(title, rounds[0])
        elif rounds[0].takes:
            self._reduce_in_pieces(title, rounds)
        else:
            self._reduce_whole(title, rounds)

    def _reduce_at_once(self, title: bytes, only: Round) -> None:
        gives, combine, takes = only
        self.slots.next()
        copy(gives)
        self.board.begin(title)
        if combine is not None:
            combine()
        if takes:
            self.board.meet()
            copy(takes)

    def _reduce_whole(self, title: bytes, rounds: Sequence[Round]) -> None:
        for index, (gives, combine, _) in enumerate(rounds):
            self.slots.next()
            copy(gives)
            self._meet(index, title)
            if combine is not None:
                combine()

    def _reduce_in_pieces(self, title: bytes, rounds: Sequence[Round]) -> None:
        self.slots.next()
        copy(rounds[0].gives)
        self.board.begin(title)
        for index, (_, combine, takes) in enumerate(rounds, 1):
            if combine is not None:
                combine()
            if index < len(rounds):
                self.slots.next()
                copy(rounds[index].gives)
            self.board.meet()  # ends phase one of the next round with phase two of this
            copy(takes)

    def _reduce_in_place(self, title: bytes, bucket: Bucket, span: Span, how: Reduction) -> None:
        self.slots.next()
        self.board.begin(_located(title, self.buckets.index(bucket), span.offset))
        bucket.reduce(span, how)
        self.board.meet()

    def reduce(self, title: bytes, flat: Tensor, how: Reduction, *, root: int) -> None:
        """Leave everyone's numbers, combined, in ``flat`` of one rank."""
        width, address = flat.element_size(), flat.data_ptr()
        own = root < 2  # the result may go over the first or second numbers: no need to move them
        for start, count in self._rounds(flat.numel(), self.slots.cached // width):
            if self.rank != root or not own:
                self.slots.put(0, address + start * width, count * width)
            self._meet(start, title)
            if self.rank == root and count:
                out = flat[start : start + count]
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
