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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ctypes import c_char, memmove
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.wire.shm.board import Board
from shoal.wire.shm.flat import ordinary
from shoal.wire.shm.reading import Reader
from shoal.wire.shm.reduction import Reduction
from shoal.wire.shm.rounds import Rounds
from shoal.wire.shm.slots import ALIGN, Slots, fair_share, share_of

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
