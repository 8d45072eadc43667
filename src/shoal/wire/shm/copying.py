"""Copy bytes among ranks that share memory: broadcast, all_gather, scatter."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove

from shoal.wire.shm.rounds import Rounds
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
        for start, count in self._rounds(nbytes, self.slots.cached):
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
        most = self.slots.share(self.size)
        for start, count in self._rounds(nbytes, most):
            for rank, source in enumerate(sources or ()):
                if rank != root:
                    self.slots.put(place(root, rank) * most, source + start, count)
            self._meet(start, title)
            if self.rank != root:
                at = place(root, self.rank) * most
                self.slots.get(root, at, target=target + start, nbytes=count)
        if sources:
            memmove(target, sources[root], nbytes)
