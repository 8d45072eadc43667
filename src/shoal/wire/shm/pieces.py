"""Combine a long message among three or more ranks, each rank's share of the work 1/n.

1. Write all pieces but one's own; meet. Combine one's own piece over all ranks, into one's slot.
2. Meet again. Copy everyone's piece from everyone's slot. By then the next round is written.
"""

from __future__ import annotations

from torch import Tensor

from shoal.wire.shm.reduction import Reduction
from shoal.wire.shm.rounds import Rounds
from shoal.wire.shm.slots import ALIGN


class Pieces(Rounds):
    """An all_reduce in two phases."""

    def _reduce_in_pieces(self, title: bytes, flat: Tensor, how: Reduction) -> None:
        width, slots = flat.element_size(), self.slots
        grain = ALIGN // width
        most = slots.nbytes // width // self.size // grain * grain * self.size
        rounds = [flat[i : i + most] for i in range(0, flat.numel(), most)]
        slots.next()
        self._give_pieces(rounds[0])
        self.board.begin(title)
        for index, part in enumerate(rounds):
            turn = slots.turn
            self._combine_piece(part, how)
            if index + 1 < len(rounds):
                slots.next()
                self._give_pieces(rounds[index + 1])
            self.board.meet()  # ends phase one of the next round with phase two of this
            ahead, slots.turn = slots.turn, turn
            self._take_pieces(part)
            slots.turn = ahead

    def _piece(self, part: Tensor, rank: int) -> tuple[int, int]:
        """From where to where a rank combines."""
        count, grain = part.numel(), ALIGN // part.element_size()
        each = -(-count // self.size // grain) * grain
        return min(rank * each, count), min((rank + 1) * each, count)

    def _give_pieces(self, part: Tensor) -> None:
        width, base = part.element_size(), part.data_ptr()
        begin, end = self._piece(part, self.rank)
        self.slots.put(0, base, begin * width)
        self.slots.put(end * width, base + end * width, (part.numel() - end) * width)

    def _combine_piece(self, part: Tensor, how: Reduction) -> None:
        begin, end = self._piece(part, self.rank)
        if end > begin:
            at = begin * part.element_size()
            out = self.slots.view(self.rank, at, numel=end - begin, dtype=part.dtype)
            how(out, self._sources(part[begin:end], at, own=True))

    def _take_pieces(self, part: Tensor) -> None:
        width, base = part.element_size(), part.data_ptr()
        for rank in range(self.size):
            begin, end = self._piece(part, rank)
            at, nbytes = begin * width, (end - begin) * width
            self.slots.get(rank, at, target=base + at, nbytes=nbytes)
