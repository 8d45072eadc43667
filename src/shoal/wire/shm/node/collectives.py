"""Copy bytes among ranks that share memory: broadcast, all_gather, scatter.

Where ranks can read each other's memory (``reading``), long parts of scatter, and of all_gather
between two, are read where they lie: their owners tell the address, all meet, who wants one reads
it, and all meet again, after which it may be changed.

all_to_all among ranks that share memory: to each rank its own part, of any size.

The collectives among ranks that share memory.

Each is a loop of rounds (``rounds``): numbers are combined (``combining``, ``prepared``), memory of
one or each is copied (``copying``), or each sends every other its part (``parting``).

Memory is given by address, numbers as flat contiguous tensors, detached.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove

from shoal.errors import LayoutMismatch
from shoal.wire.shm.memory.buffers import ALIGN, place
from shoal.wire.shm.node.reduce import Combining
from shoal.wire.shm.node.rounds import Extent, Rounds, apart


class Copying(Rounds):
    """The collectives that copy what one rank, or each, has; memory is given by address."""

    def broadcast(self, title: bytes, address: int, nbytes: int, *, root: int) -> None:
        """Copy one rank's memory to everyone's."""
        for start, count in self._rounds(nbytes, self.slots.cached):
            if self.rank == root:
                self.slots.put(0, address + start, count)
            self._meet(start, title)
            if self.rank != root:
                self.slots.get(root, 0, target=address + start, nbytes=count)

    def all_gather(
        self, title: bytes, source: int, *, nbytes: int, targets: Sequence[int] | None
    ) -> None:
        """Copy everyone's ``nbytes`` to ``targets``, one address a rank; None: read nothing."""
        given = targets or ()
        others = [(target, nbytes) for rank, target in enumerate(given) if rank != self.rank]
        kept, [(source, _)] = apart([(source, nbytes)], others)
        if self.size == 2 and nbytes >= self._read.least_nbytes:  # to read many copies costs more
            self._read_each(title, source, nbytes=nbytes, targets=given)
        else:
            self._copy_each(title, source, nbytes=nbytes, targets=given)
        if given and given[self.rank] != source:
            memmove(given[self.rank], source, nbytes)
        del kept  # nobody reads it any more

    def _copy_each(self, title: bytes, source: int, *, nbytes: int, targets: Sequence[int]) -> None:
        for start, count in self._rounds(nbytes, self.slots.cached):
            self.slots.put(0, source + start, count)
            self._meet(start, title)
            for rank, target in enumerate(targets):
                if rank != self.rank:
                    self.slots.get(rank, 0, target=target + start, nbytes=count)

    def _read_each(self, title: bytes, source: int, *, nbytes: int, targets: Sequence[int]) -> None:
        self.slots.next()
        self.slots.tell([source])
        self.board.begin(title)
        for rank, target in enumerate(targets):
            if rank != self.rank:
                (there,) = self.slots.integers(rank, 1)
                self._read(rank, there, target=target, nbytes=nbytes)
        self.board.meet()

    def scatter(
        self, title: bytes, sources: Sequence[int], *, nbytes: int, target: int, root: int
    ) -> None:
        """Copy ``nbytes`` of the root's ``sources``, one address a rank, to each rank."""
        if nbytes >= self._read.least_nbytes:
            self._read_one(title, sources, nbytes=nbytes, target=target, root=root)
            return
        most = self.slots.share(self.size)
        for start, count in self._rounds(nbytes, most):
            for rank, source in enumerate(sources):
                if rank != root:
                    self.slots.put(place(root, rank) * most, source + start, count)
            self._meet(start, title)
            if self.rank != root:
                at = place(root, self.rank) * most
                self.slots.get(root, at, target=target + start, nbytes=count)
        if sources:
            memmove(target, sources[root], nbytes)

    def _read_one(
        self, title: bytes, sources: Sequence[int], *, nbytes: int, target: int, root: int
    ) -> None:
        others = [(source, nbytes) for rank, source in enumerate(sources) if rank != root]
        kept, told = apart(others, [(target, nbytes)])
        self.slots.next()
        self.slots.tell([address for address, _ in told])
        self.board.begin(title)
        if self.rank == root:
            memmove(target, sources[root], nbytes)
        else:
            there = self.slots.integers(root, self.size - 1)[place(root, self.rank)]
            self._read(root, there, target=target, nbytes=nbytes)
        self.board.meet()
        del kept  # nobody reads it any more


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


class Host(Combining, Copying, Parting):
    """The ranks of one group that share memory, as one of them sees them, and all they can do."""
