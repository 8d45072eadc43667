"""Prepare, once for each tensor, what an all_reduce copies and combines.

Training reduces the same tensors again and again. To compute the addresses and create the views in
Python takes longer than to copy a megabyte. So the rounds of a message are prepared once, and kept
by the address of the tensor.

A message is reduced in one of two ways:

*One phase* is used for short messages and for two ranks. Every rank combines all elements, and a
round has one barrier. *Two phases* are used in all other cases. Each rank combines 1/n of a round,
which is less work but needs one more barrier. With the pieces a, b, c of three ranks, the slots
contain::

    rank    phase 1: written         phase 2: combined
    0       |  -  | x0b | x0c |      | sum a |  x0b  |  x0c  |
    1       | x1a |  -  | x1c |      |  x1a  | sum b |  x1c  |
    2       | x2a | x2b |  -  |      |  x2a  |  x2b  | sum c |

1. Each rank writes all pieces except its own into its slot. After the barrier it combines its own
   piece from all ranks into its slot, and copies the result to its tensor.
2. It writes the pieces of the next round into its other slot. After the barrier it copies the
   results of the other ranks from their slots.

Round k+2 is written into the slot of round k while other ranks may still copy results from there.
This is safe, because the result of a rank has the same position in every round of a message, and
phase 1 never writes to that position. All other pieces in the slot have already been combined.
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

_SHORT_NBYTES = 1 << 20  # of all ranks together; combining so few bytes is faster than a barrier

MemoryCopy = tuple[int, int, int]  # target address, source address, bytes


def copy(copies: Iterable[MemoryCopy]) -> None:
    """Run copies one after the other."""
    for target, source, nbytes in copies:
        memmove(target, source, nbytes)


class PreparedRound(NamedTuple):
    """One rank's part in a round."""

    copies_in: tuple[MemoryCopy, ...]  # into this rank's slot, before the barrier
    combine: Callable[[], None] | None  # called after the barrier; None if nothing to combine
    copies_out: tuple[MemoryCopy, ...] = ()  # from other slots, after the barrier of phase 2


def prepare_rounds(slots: Slots, tensor: Tensor, op: Reduction) -> list[PreparedRound]:
    """Return the rounds of an all_reduce whose first round uses the slots of the next turn.

    The rounds refer to the tensor's memory by address and do not keep it alive.
    """
    turn = slots.turn
    with torch.inference_mode(False):  # the views are also used outside inference mode
        flat = tensor_at(tensor.data_ptr(), tensor.nbytes).view(tensor.dtype)
        rounds = _prepare(slots, flat, op)
    slots.turn = turn
    return rounds


def _prepare(slots: Slots, flat: Tensor, op: Reduction) -> list[PreparedRound]:
    width, numel, size = flat.element_size(), flat.numel(), slots.size
    most = slots.round_nbytes // width
    if size == 2 or flat.nbytes <= min(_SHORT_NBYTES // size, slots.round_nbytes):
        cuts = slots.rounds(numel, most)
        return [_one_phase_round(slots, flat[start : start + count], op) for start, count in cuts]
    grain = ALIGN // width * size  # elements, so that each piece has whole cache lines
    most = most // grain * grain
    share = share_numel(-(-numel // -(-numel // most)), size, width=width)
    cuts = slots.rounds(numel, share * size)
    parts = (flat[start : start + count] for start, count in cuts)  # each part begins the next turn
    return [_two_phase_round(slots, part, op, share=share) for part in parts]


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
    """Combine, and copy the result to the tensor while it is in the cache of this core."""
    combine()
    memmove(*result)
