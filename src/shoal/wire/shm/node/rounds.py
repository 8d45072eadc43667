"""What the collectives of a host have in common: rounds, each with a slot of its own, and meetings.

In a round a rank writes its part into its slot, meets the others, and reads or combines what they
wrote; slots in turns make one meeting a round enough (``slots``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import memmove

import torch
from torch import Tensor

from shoal.wire.shm.memory.barrier import Board
from shoal.wire.shm.memory.buffers import Bucket, Slots
from shoal.wire.shm.memory.cma import Reader

Extent = tuple[int, int]  # address and bytes


def apart(
    sources: Sequence[Extent], targets: Sequence[Extent]
) -> tuple[Tensor | None, Sequence[Extent]]:
    """Memory to keep, and sources that others may read while targets are written."""
    if not _overlap(sources, targets):
        return None, sources
    room = torch.empty(sum(nbytes for _, nbytes in sources), dtype=torch.uint8)
    copies, address = [], room.data_ptr()
    for source, nbytes in sources:
        memmove(address, source, nbytes)
        copies.append((address, nbytes))
        address += nbytes
    return room, copies


def _overlap(sources: Sequence[Extent], targets: Sequence[Extent]) -> bool:
    """Whether any source shares memory with any target; sources may with each other."""
    spans = [(a, a + n, kind) for kind, them in enumerate((sources, targets)) for a, n in them if n]
    ends = [0, 0]  # of the sources met so far, and of the targets
    for begin, end, kind in sorted(spans):
        if begin < ends[1 - kind]:
            return True
        ends[kind] = max(ends[kind], end)
    return False


class Rounds:
    """The ranks of one group that share memory, as one of them sees them.

    Args:
        board: where they meet.
        slots: where their data lies.
        reader: of the other ranks' memory.
    """

    def __init__(self, board: Board, slots: Slots, reader: Reader) -> None:
        self.board, self.slots, self._read = board, slots, reader
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

    def _sources(self, mine: Tensor, at: int, *, own: bool) -> list[Tensor]:
        """The numbers of each rank: from its slot, or ``mine`` for this rank's own."""
        numel, dtype, view = mine.numel(), mine.dtype, self.slots.view
        return [
            mine if own and rank == self.rank else view(rank, at, numel=numel, dtype=dtype)
            for rank in range(self.size)
        ]

    def barrier(self, title: bytes) -> None:
        """Wait for everyone."""
        self.slots.next()  # as all do once before they first meet: so turns agree after a mismatch
        self.board.begin(title)
