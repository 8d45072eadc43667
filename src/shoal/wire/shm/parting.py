"""all_to_all among ranks that share memory: to each rank its own part, of any size."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove

from shoal.errors import LayoutMismatch
from shoal.wire.shm.rounds import Extent, Rounds, apart
from shoal.wire.shm.slots import ALIGN, place


class Parting(Rounds):
    """all_to_all; the parts are cut into rounds together, as many as the longest needs.

    Parts that are long enough are read where they lie instead: both ends know which those are.
    """

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
        head = -(-24 * self.size // ALIGN) * ALIGN
        share = self.slots.share(self.size, head)
        kept, sources = apart(sources, targets)
        tables: list[list[int]] = []
        start, longest = 0, 1
        while start < longest:
            self.slots.next()
            if start == 0:
                sizes = [n for _, n in sources] + [n for _, n in targets]
                self.slots.tell([*sizes, *(address for address, _ in sources)])
            self._send_parts(sources, start, head=head, share=share)
            self._meet(start, title)
            if start == 0:
                tables = [self.slots.integers(rank, 3 * self.size) for rank in range(self.size)]
                longest = self._agree_parts(tables)
            self._take_parts(targets, start, head=head, share=share)
            start += share
        memmove(targets[self.rank][0], *sources[self.rank])
        if any(self._is_long(n) for table in tables for n in table[: self.size]):
            self._read_parts(targets, [table[2 * self.size + self.rank] for table in tables])
            self.board.meet()
        del kept  # nobody reads it any more

    def _is_long(self, nbytes: int) -> bool:
        return nbytes >= self._read.least_nbytes

    def _send_parts(self, sources: Sequence[Extent], start: int, *, head: int, share: int) -> None:
        for rank, (source, nbytes) in enumerate(sources):
            if start < nbytes and not self._is_long(nbytes) and rank != self.rank:
                at = head + place(self.rank, rank) * share
                self.slots.put(at, source + start, min(share, nbytes - start))

    def _take_parts(self, targets: Sequence[Extent], start: int, *, head: int, share: int) -> None:
        for rank, (target, nbytes) in enumerate(targets):
            if start < nbytes and not self._is_long(nbytes) and rank != self.rank:
                at, count = head + place(rank, self.rank) * share, min(share, nbytes - start)
                self.slots.get(rank, at, target=target + start, nbytes=count)

    def _read_parts(self, targets: Sequence[Extent], addresses: Sequence[int]) -> None:
        for rank, (target, nbytes) in enumerate(targets):
            if self._is_long(nbytes) and rank != self.rank:
                self._read(rank, addresses[rank], target=target, nbytes=nbytes)

    def _agree_parts(self, tables: Sequence[Sequence[int]]) -> int:
        """The longest part that goes through the slots, once all sizes are seen to fit."""
        names, longest = self.board.lines.names, 0
        for sender, table in enumerate(tables):
            for taker, sent in enumerate(table[: self.size]):
                expected = tables[taker][self.size + sender]
                if sent != expected:
                    raise LayoutMismatch(
                        f"all_to_all: rank {names[sender]} sends {sent} bytes to rank "
                        f"{names[taker]}, which expects {expected}; the splits must agree"
                    )
                if not self._is_long(sent):
                    longest = max(longest, sent)
        return longest
