"""What an all_reduce copies and combines, worked out once for each tensor.

Training reduces the same tensors again and again. Finding the addresses and making the views anew
takes Python longer than a processor takes to move a megabyte, above all where ranks share a core
and find its cache cold.

There are two ways. *Whole*: everyone combines everything, one meeting a round. *Pieces*: each rank
combines 1/n of a round, which is less work and one more meeting:

1. Write all pieces but one's own; meet. Combine one's own piece over all ranks, into one's slot.
2. Meet again. Copy the others' pieces from their slots. By then the next round is written.

A rank's piece has the same place in every round of a message. So while others still copy it out of
a slot, the rest of that slot, which they have combined, is written for the next round but one.

Combine numbers among ranks that share memory: all_reduce, reduce, reduce_scatter.

A long message among three or more goes in two phases, each rank's share of work 1/n; between two
ranks, or if it is short, everyone combines everything (``prepared``). Numbers in a shared bucket
are combined where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from ctypes import c_char, memmove
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.wire.shm.memory.barrier import Board, entitled
from shoal.wire.shm.memory.buffers import ALIGN, Bucket, Slots, Span, fair_share, share_of
from shoal.wire.shm.memory.cma import Reader
from shoal.wire.shm.memory.reduce_ops import Reduction, ordinary
from shoal.wire.shm.node.rounds import Rounds

_SHORT_NBYTES = 1 << 20  # of all ranks: to combine these everywhere costs less than to meet again
_KEPT_ROUNDS = 1024  # at most; the oldest messages are forgotten first

Copy = tuple[int, int, int]  # to which address, from which, how many bytes


def copy(copies: Iterable[Copy]) -> None:
    """Do some copies."""
    for to, source, nbytes in copies:
        memmove(to, source, nbytes)


def _keep(combine: Callable[[], None], result: Copy) -> None:
    """Combine, and copy the result while it is in this core's cache."""
    combine()
    memmove(*result)


class Round(NamedTuple):
    """One rank's part in a round.

    Attributes:
        gives: copies before the meeting.
        combine: what to do after it; None if there is nothing to combine.
        takes: copies after the second meeting.
    """

    gives: tuple[Copy, ...]
    combine: Callable[[], None] | None
    takes: tuple[Copy, ...] = ()


class Preparing(Rounds):
    """Works out the rounds of messages, and keeps them."""

    def __init__(self, board: Board, slots: Slots, reader: Reader) -> None:
        super().__init__(board, slots, reader)
        self._kept: dict[tuple[bytes, int, int, int], list[Round]] = {}
        self._count = 0  # of rounds that are kept

    def _whole(self, nbytes: int) -> bool:
        """Whether everyone combines everything in a message of ``nbytes``."""
        return self.size == 2 or nbytes <= min(_SHORT_NBYTES // self.size, self.slots.cached)

    def _prepared(self, title: bytes, flat: Tensor, how: Reduction) -> list[Round]:
        """The rounds of a message, which begins with the slot whose turn is next.

        What is kept refers to the message's memory by address and does not keep it alive; it is
        used again only for a tensor at the same address, with the same title, which tells size,
        type and operation.
        """
        key = title, flat.data_ptr(), self.slots.turn, torch.get_num_threads()
        rounds = self._kept.get(key)
        if rounds is None:
            turn = self.slots.turn
            with ordinary():
                rounds = self._kept[key] = self._work_out(_view(flat), how)
            self.slots.turn = turn
            self._count += len(rounds)
            while self._count > _KEPT_ROUNDS and len(self._kept) > 1:
                self._count -= len(self._kept.pop(next(iter(self._kept))))
        return rounds

    def _work_out(self, flat: Tensor, how: Reduction) -> list[Round]:
        width, numel = flat.element_size(), flat.numel()
        most = self.slots.cached // width
        if self._whole(flat.nbytes):
            cut = self._rounds(numel, most)
            return [self._whole_round(flat[at : at + count], how) for at, count in cut]
        grain = ALIGN // width * self.size  # whole lines for each piece
        most = most // grain * grain
        share = fair_share(-(-numel // -(-numel // most)), self.size, width=width)
        cut = self._rounds(numel, share * self.size)
        return [self._piece_round(flat[at : at + count], how, share=share) for at, count in cut]

    def _whole_round(self, part: Tensor, how: Reduction) -> Round:
        if not part.numel():
            return Round((), None)
        gives = ((self.slots.address(self.rank), part.data_ptr(), part.nbytes),)
        return Round(gives, how.prepare(part, self._sources(part, 0, own=self.size == 2)))

    def _piece_round(self, part: Tensor, how: Reduction, *, share: int) -> Round:
        width, base, slots = part.element_size(), part.data_ptr(), self.slots
        own = slots.address(self.rank)
        shares = [share_of(rank, share, numel=part.numel()) for rank in range(self.size)]
        begin, end = shares[self.rank]
        after = end * width
        parts = (own, base, begin * width), (own + after, base + after, part.nbytes - after)
        gives = tuple(each for each in parts if each[2])
        takes = tuple(
            (base + first * width, slots.address(rank) + first * width, (last - first) * width)
            for rank, (first, last) in enumerate(shares)
            if rank != self.rank
        )
        if begin == end:
            return Round(gives, None, takes)
        out = slots.view(self.rank, begin * width, numel=end - begin, dtype=part.dtype)
        sources = self._sources(part[begin:end], begin * width, own=True)
        result = base + begin * width, out.data_ptr(), out.nbytes
        return Round(gives, partial(_keep, how.prepare(out, sources), result), takes)


def _view(flat: Tensor) -> Tensor:
    """The same numbers, by address: a view that does not keep them alive."""
    if not flat.numel():
        return flat.new_empty(0)
    memory = (c_char * flat.nbytes).from_address(flat.data_ptr())
    return torch.frombuffer(memory, dtype=flat.dtype)


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
