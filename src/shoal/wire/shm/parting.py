"""all_to_all among ranks that share memory: to each rank its own part, of any size."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove

from shoal.errors import LayoutMismatch
from shoal.wire.shm.rounds import Rounds
from shoal.wire.shm.slots import ALIGN, place

Extent = tuple[int, int]  # address and bytes


class Parting(Rounds):
    """all_to_all; the parts are cut into rounds together, as many as the longest needs."""

    def all_to_all(
        self, title: bytes, sources: Sequence[Extent], targets: Sequence[Extent]
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
        share = self.slots.share(self.size, head)
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

    def _send_parts(self, sources: Sequence[Extent], start: int, *, head: int, share: int) -> None:
        for rank, (source, nbytes) in enumerate(sources):
            if nbytes > start and rank != self.rank:
                at = head + place(self.rank, rank) * share
                self.slots.put(at, source + start, min(share, nbytes - start))

    def _take_parts(self, targets: Sequence[Extent], start: int, *, head: int, share: int) -> None:
        for rank, (target, nbytes) in enumerate(targets):
            if nbytes > start and rank != self.rank:
                at, count = head + place(rank, self.rank) * share, min(share, nbytes - start)
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
