"""Copy bytes among ranks that share memory: broadcast, all_gather, scatter.

Where ranks can read each other's memory (``reading``), long parts of scatter, and of all_gather
between two, are read where they lie: their owners tell the address, all meet, who wants one reads
it, and all meet again, after which it may be changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove

from shoal.wire.shm.rounds import Rounds, apart
from shoal.wire.shm.slots import place


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
