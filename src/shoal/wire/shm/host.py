"""The collectives among ranks that share memory.

Each is a loop of rounds. In a round a rank writes its part into its slot, meets the others, and
reads or combines what they wrote; slots in turns make one meeting a round enough (``slots``).

Combining a long message among three or more goes in two phases, each rank's share of work 1/n:

1. Write all pieces but one's own; meet. Combine one's own piece over all ranks, into one's slot.
2. Meet again. Copy everyone's piece from everyone's slot. By then the next round is written.

Between two ranks, or for a short message, everyone combines everything: one meeting, no phase two.

Memory is given by address, numbers as flat contiguous tensors, detached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import memmove

from torch import Tensor

from shoal.errors import LayoutMismatch
from shoal.wire.shm.board import Board, entitled
from shoal.wire.shm.bucket import Bucket, Span
from shoal.wire.shm.reduction import Reduction
from shoal.wire.shm.slots import ALIGN, Slots

_SHORT_NBYTES = 16 << 10  # below, everyone combines everything


class Host:
    """The ranks of one group that share memory, as one of them sees them.

    Args:
        board: where they meet.
        slots: where their data lies.
    """

    def __init__(self, board: Board, slots: Slots) -> None:
        self.board, self.slots = board, slots
        self.buckets: list[Bucket] = []
        self.rank, self.size = board.lines.rank, board.lines.size

    def _rounds(self, total: int, most: int) -> Iterator[tuple[int, int]]:
        """Cut ``total`` into (start, count), each in a slot of its own; at least one."""
        if total <= most:
            self.slots.next()
            yield 0, total
            return
        for start in range(0, total, most):
            self.slots.next()
            yield start, min(most, total - start)

    def _meet(self, start: int, title: bytes) -> None:
        """The first meeting of a collective compares titles."""
        if start == 0:
            self.board.begin(title)
        else:
            self.board.meet()

    def barrier(self, title: bytes) -> None:
        """Wait for everyone."""
        self.slots.next()  # as all do once before they first meet: so turns agree after a mismatch
        self.board.begin(title)

    def all_reduce(self, title: bytes, flat: Tensor, how: Reduction) -> None:
        """Leave everyone's numbers, combined, in ``flat`` of everyone."""
        for bucket in self.buckets:
            span = bucket.span(flat)
            if span is not None:
                self._reduce_in_place(title, bucket, span, how)
                return
        if self.size == 2 or flat.nbytes <= _SHORT_NBYTES:
            self._reduce(title, flat, how, range(self.size))
        else:
            self._reduce_in_pieces(title, flat, how)

    def _reduce_in_place(self, title: bytes, bucket: Bucket, span: Span, how: Reduction) -> None:
        self.slots.next()
        where = f" in place at {self.buckets.index(bucket)}+{span.offset}"
        self.board.begin(entitled(title.decode().strip() + where))
        bucket.reduce(span, how)
        self.board.meet()

    def reduce(self, title: bytes, flat: Tensor, how: Reduction, *, root: int) -> None:
        """Leave everyone's numbers, combined, in ``flat`` of one rank."""
        self._reduce(title, flat, how, (root,))

    def _reduce(self, title: bytes, flat: Tensor, how: Reduction, readers: Sequence[int]) -> None:
        width, address = flat.element_size(), flat.data_ptr()
        own = self.size == 2  # read one's own numbers where they are
        for start, count in self._rounds(flat.numel(), self.slots.nbytes // width):
            self.slots.put(0, address + start * width, count * width)
            self._meet(start, title)
            if self.rank in readers and count:
                out = flat if count == flat.numel() else flat[start : start + count]
                how(out, self._sources(out, 0, own=own))

    def _sources(self, mine: Tensor, at: int, *, own: bool) -> list[Tensor]:
        """The numbers of each rank: from its slot, or ``mine`` for this rank's own."""
        numel, dtype, view = mine.numel(), mine.dtype, self.slots.view
        return [
            mine if own and rank == self.rank else view(rank, at, numel=numel, dtype=dtype)
            for rank in range(self.size)
        ]

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

    def broadcast(self, title: bytes, address: int, nbytes: int, *, root: int) -> None:
        """Copy one rank's memory to everyone's."""
        for start, count in self._rounds(nbytes, self.slots.nbytes):
            if self.rank == root:
                self.slots.put(0, address + start, count)
            self._meet(start, title)
            if self.rank != root:
                self.slots.get(root, 0, target=address + start, nbytes=count)

    def all_gather(
        self, title: bytes, source: int, *, nbytes: int, targets: Sequence[int] | None
    ) -> None:
        """Copy everyone's ``nbytes`` to ``targets``, one address a rank; None: read nothing."""
        for start, count in self._rounds(nbytes, self.slots.nbytes):
            self.slots.put(0, source + start, count)
            self._meet(start, title)
            for rank, target in enumerate(targets or ()):
                if rank != self.rank:
                    self.slots.get(rank, 0, target=target + start, nbytes=count)
        if targets and targets[self.rank] != source:
            memmove(targets[self.rank], source, nbytes)

    def scatter(
        self, title: bytes, sources: Sequence[int] | None, *, nbytes: int, target: int, root: int
    ) -> None:
        """Copy ``nbytes`` of the root's ``sources``, one address a rank, to each rank."""
        most = self._share(0)
        for start, count in self._rounds(nbytes, most):
            for rank, source in enumerate(sources or ()):
                if rank != root:
                    self.slots.put(_place(root, rank) * most, source + start, count)
            self._meet(start, title)
            if self.rank != root:
                at = _place(root, self.rank) * most
                self.slots.get(root, at, target=target + start, nbytes=count)
        if sources:
            memmove(target, sources[root], nbytes)

    def _share(self, head: int) -> int:
        """Bytes of a slot, behind its head, for one rank, when each other rank gets its own."""
        return (self.slots.nbytes - head) // max(self.size - 1, 1) // ALIGN * ALIGN

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
        share = self.slots.nbytes // (1 if own else self.size) // ALIGN * ALIGN
        at = 0 if own else share
        for start, count in self._rounds(out.numel(), share // width):
            for rank, source in enumerate(sources):
                if not own or rank != self.rank:
                    self.slots.put(rank * at, source + start * width, count * width)
            self._meet(start, title)
            if count:
                target, piece = out[start : start + count], mine[start : start + count]
                how(target, self._sources(piece, self.rank * at, own=own))

    def all_to_all(
        self, title: bytes, sources: Sequence[tuple[int, int]], targets: Sequence[tuple[int, int]]
    ) -> None:
        """Send each rank its own part.

        Args:
            title: of the collective.
            sources: (address, bytes) of what goes to each rank.
            targets: (address, bytes) of where each rank's part goes.

        Raises:
            LayoutMismatch: a rank sends more or less than another expects; on all ranks.
        """
        head = -(-16 * self.size // ALIGN) * ALIGN
        share = self._share(head)
        sizes = [n for _, n in sources] + [n for _, n in targets]
        table = b"".join(n.to_bytes(8, "little") for n in sizes)
        start, longest = 0, 1
        while start < longest:
            self.slots.next()
            if start == 0:
                memmove(self.slots.address(self.rank), table, len(table))
            self._send_parts(sources, start, head=head, share=share)
            self._meet(start, title)
            if start == 0:
                longest = self._agree_parts()
            self._take_parts(targets, start, head=head, share=share)
            start += share
        memmove(targets[self.rank][0], *sources[self.rank])

    def _send_parts(
        self, sources: Sequence[tuple[int, int]], start: int, *, head: int, share: int
    ) -> None:
        for rank, (source, nbytes) in enumerate(sources):
            if nbytes > start and rank != self.rank:
                at = head + _place(self.rank, rank) * share
                self.slots.put(at, source + start, min(share, nbytes - start))

    def _take_parts(
        self, targets: Sequence[tuple[int, int]], start: int, *, head: int, share: int
    ) -> None:
        for rank, (target, nbytes) in enumerate(targets):
            if nbytes > start and rank != self.rank:
                at, count = head + _place(rank, self.rank) * share, min(share, nbytes - start)
                self.slots.get(rank, at, target=target + start, nbytes=count)

    def _agree_parts(self) -> int:
        """The longest part of any rank, once all sizes are seen to fit."""
        tables = [self.slots.integers(rank, 2 * self.size) for rank in range(self.size)]
        names = self.board.lines.names
        for sender, table in enumerate(tables):
            for taker, sent in enumerate(table[: self.size]):
                expected = tables[taker][self.size + sender]
                if sent != expected:
                    raise LayoutMismatch(
                        f"all_to_all: rank {names[sender]} sends {sent} bytes to rank "
                        f"{names[taker]}, which expects {expected}; the splits must agree"
                    )
        return max(max(table) for table in tables)


def _place(giver: int, taker: int) -> int:
    """Which part of the giver's slot is the taker's, when none is for the giver itself."""
    return taker - (taker > giver)
