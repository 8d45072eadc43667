"""What an all_reduce copies and combines, prepared once for each tensor.

Training reduces the same tensors again and again. Finding the addresses and creating the views anew
takes Python longer than a processor takes to move a megabyte, above all where ranks share a core
and find its cache cold. So the rounds of a message are prepared once, and found by its address.

A message is reduced in one of two ways:

*One phase*, for short messages and two ranks: every rank combines all elements, one barrier a
round. *Two phases*, for the others: each rank combines 1/n of a round, which is less work and one
more barrier. With the pieces a, b, c of three ranks, the slots hold::

    rank    phase 1: written         phase 2: combined
    0       |  -  | x0b | x0c |      | sum a |  x0b  |  x0c  |
    1       | x1a |  -  | x1c |      |  x1a  | sum b |  x1c  |
    2       | x2a | x2b |  -  |      |  x2a  |  x2b  | sum c |

1. Write all pieces but this rank's own into its slot; barrier. Combine this rank's own piece of all
   ranks into its slot, and copy the result to the tensor.
2. Write phase 1 of the next round; barrier. Copy the other ranks' results from their slots.

Why two slots are enough though round k+2 is written into the slot of round k while other ranks may
still copy results from it: a rank's own piece has the same position in every round of a message,
and phase 1 never writes to that position; the rest of the slot has been combined already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ctypes import memmove
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.wire.shm.memory.buffers import ALIGN, Slots, share_numel, share_range, tensor_at
from shoal.wire.shm.memory.reduce_ops import Reduction

_SHORT_NBYTES = 1 << 20  # of all ranks: combining these on every rank costs less than a barrier

MemoryCopy = tuple[int, int, int]  # target address, source address, bytes


def copy(copies: Iterable[MemoryCopy]) -> None:
    """Do some copies."""
    for target, source, nbytes in copies:
        memmove(target, source, nbytes)


class PreparedRound(NamedTuple):
    """One rank's part in a round."""

    copies_in: tuple[MemoryCopy, ...]  # into this rank's slot, before the barrier
    combine: Callable[[], None] | None  # called after the barrier; None: nothing to combine
    copies_out: tuple[MemoryCopy, ...] = ()  # from other slots, after the barrier of phase 2


def prepare_rounds(slots: Slots, tensor: Tensor, op: Reduction) -> list[PreparedRound]:
    """Prepare the rounds of a message that begins with the slots' next turn.

    The rounds refer to the tensor's memory by address and do not keep it alive.
    """
    turn = slots.turn
    with torch.inference_mode(False):  # the views are used again later, in any mode
        flat = tensor_at(tensor.data_ptr(), tensor.nbytes).view(tensor.dtype)
        rounds = _prepare(slots, flat, op)
    slots.turn = turn
    return rounds


def _prepare(slots: Slots, flat: Tensor, op: Reduction) -> list[PreparedRound]:
    width, numel, size = flat.element_size(), flat.numel(), slots.size
    most = slots.round_nbytes // width
    if size == 2 or flat.nbytes <= min(_SHORT_NBYTES // size, slots.round_nbytes):
        cuts = slots.rounds(numel, most)
        return [_one_phase_round(slots, flat[at : at + count], op) for at, count in cuts]
    grain = ALIGN // width * size  # whole cache lines for each piece
    most = most // grain * grain
    share = share_numel(-(-numel // -(-numel // most)), size, width=width)
    cuts = slots.rounds(numel, share * size)
    return [_two_phase_round(slots, flat[at : at + count], op, share=share) for at, count in cuts]


def _one_phase_round(slots: Slots, part: Tensor, op: Reduction) -> PreparedRound:
    if not part.numel():
        return PreparedRound((), None)
    copies_in = ((slots.address(slots.rank), part.data_ptr(), part.nbytes),)
    sources = slots.views(part, 0, use_own=slots.size == 2)
    return PreparedRound(copies_in, op.prepare(part, sources))


def _two_phase_round(slots: Slots, part: Tensor, op: Reduction, *, share: int) -> PreparedRound:
    width, base, slot = part.element_size(), part.data_ptr(), slots.address(slots.rank)
    ranges = [share_range(rank, share, numel=part.numel()) for rank in range(slots.size)]
    begin, end = ranges[slots.rank]
    first, last = begin * width, end * width
    around = (slot, base, first), (slot + last, base + last, part.nbytes - last)
    copies_in = tuple(piece for piece in around if piece[2])
    copies_out = tuple(
        (base + a * width, slots.address(rank) + a * width, (b - a) * width)
        for rank, (a, b) in enumerate(ranges)
        if rank != slots.rank
    )
    if begin == end:
        return PreparedRound(copies_in, None, copies_out)
    out = slots.view(slots.rank, first, numel=end - begin, dtype=part.dtype)
    combine = op.prepare(out, slots.views(part[begin:end], first, use_own=True))
    result = base + first, out.data_ptr(), out.nbytes
    return PreparedRound(copies_in, partial(_combine_and_copy, combine, result), copies_out)


def _combine_and_copy(combine: Callable[[], None], result: MemoryCopy) -> None:
    """Combine, and copy the result while it is in this core's cache."""
    combine()
    memmove(*result)
