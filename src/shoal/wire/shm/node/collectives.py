"""The collectives between ranks that share memory.

Each collective is a loop of rounds. In a round every sender writes its part into its slot, all wait
at the barrier, and the receivers read or combine what was written. Each rank has two slots, so a
round needs only one barrier (``memory/buffers.py``). There are two exceptions:

- all_reduce may use two phases (``node/reduce.py``), or shared buffers instead of slots.
- Long parts of scatter and all_to_all, and of all_gather between two ranks, are read from the
  sender's memory, if the kernel allows it (``memory/cma.py``): the senders write the addresses into
  their slots, all wait at the barrier, the others read, and all wait again. Then the senders may
  change the memory.

Memory to copy is given as addresses, and elements to combine are given as flat, contiguous and
detached tensors. Ranks compare ``signature`` at the first barrier. All ranks must call the same
method together.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove
from functools import lru_cache

import torch
from torch import Tensor

from shoal.errors import LayoutMismatch
from shoal.wire.shm.memory.barrier import Barrier, op_signature
from shoal.wire.shm.memory.buffers import ALIGN, SharedBuffer, Slots, part_index
from shoal.wire.shm.memory.cma import CmaReader
from shoal.wire.shm.memory.reduce_ops import Reduction
from shoal.wire.shm.node.reduce import PreparedRound, copy, prepare_rounds

MemoryRange = tuple[int, int]  # address and bytes
_CACHED_ROUNDS = 1024  # the most rounds kept; the oldest are dropped first


class NodeCollectives:
    """The collectives of the ranks of a group that are on one node."""

    def __init__(self, barrier: Barrier, slots: Slots, reader: CmaReader) -> None:
        self._barrier, self.slots, self._read = barrier, slots, reader
        self.rank, self.size = slots.rank, slots.size
        self.buffers: list[SharedBuffer] = []
        self._prepared: dict[tuple[bytes, int, int, int], list[PreparedRound]] = {}
        self._prepared_count = 0  # number of rounds in _prepared

    def _sync(self, start: int, signature: bytes) -> None:
        """Wait at the barrier of a round. In the first round, also compare signatures."""
        if start == 0:
            self._barrier.begin(signature)
        else:
            self._barrier.wait()

    def barrier(self, signature: bytes) -> None:
        """Wait for all ranks."""
        self.slots.next()  # as in every collective, so that turns stay equal after a mismatch
        self._barrier.begin(signature)

    def all_reduce(self, signature: bytes, flat: Tensor, op: Reduction) -> None:
        """Combine ``flat`` of all ranks, in place on all ranks. ``node/reduce.py`` explains how.

        Prepared rounds are cached. They are used again for a tensor at the same address with the
        same signature (size, dtype and operation), slot turn and number of torch threads.
        """
        for buffer in self.buffers:
            if (elements := buffer.locate(flat)) is not None:
                self.slots.next()
                index = self.buffers.index(buffer)
                self._barrier.begin(_in_place_signature(signature, index, elements.offset))
                buffer.reduce(elements, op)
                self._barrier.wait()
                return
        slots, barrier = self.slots, self._barrier
        key = signature, flat.data_ptr(), slots.turn, torch.get_num_threads()
        rounds = self._prepared.get(key) or self._prepare(key, flat, op)
        slots.next()
        copy(rounds[0].copies_in)
        barrier.begin(signature)
        for following, (_, combine, copies_out) in enumerate(rounds, 1):
            if combine is not None:
                combine()
            if following < len(rounds):
                slots.next()
                copy(rounds[following].copies_in)
            elif not copies_out:
                return
            barrier.wait()  # for phase 1 of the following round and phase 2 of this round
            copy(copies_out)

    def _prepare(
        self, key: tuple[bytes, int, int, int], flat: Tensor, op: Reduction
    ) -> list[PreparedRound]:
        rounds = self._prepared[key] = prepare_rounds(self.slots, flat, op)
        self._prepared_count += len(rounds)
        while self._prepared_count > _CACHED_ROUNDS and len(self._prepared) > 1:
            self._prepared_count -= len(self._prepared.pop(next(iter(self._prepared))))
        return rounds

    def reduce(self, signature: bytes, flat: Tensor, op: Reduction, *, root: int) -> None:
        """Combine ``flat`` of all ranks into that of the root. Other ranks keep their own."""
        width, address, slots = flat.element_size(), flat.data_ptr(), self.slots
        in_place = root < 2  # Reduction may write into the first or second source
        for start, count in slots.rounds(flat.numel(), slots.round_nbytes // width):
            if self.rank != root or not in_place:
                slots.put(0, address + start * width, count * width)
            self._sync(start, signature)
            if self.rank == root and count:
                out = flat[start : start + count]
                op(out, slots.views(out, 0, use_own=in_place))

    def reduce_scatter(
        self, signature: bytes, sources: Sequence[int], *, own: Tensor, out: Tensor, op: Reduction
    ) -> None:
        """Combine what is at ``sources[r]`` of all ranks into ``out`` of rank r, for all r.

        ``own`` is the tensor at ``sources[self.rank]``. It may be the same tensor as ``out``.
        """
        width, slots, pair = out.element_size(), self.slots, self.size == 2
        share = slots.round_nbytes // (1 if pair else self.size) // ALIGN * ALIGN
        stride = 0 if pair else share
        for start, count in slots.rounds(out.numel(), share // width):
            for rank, source in enumerate(sources):
                if not pair or rank != self.rank:
                    slots.put(rank * stride, source + start * width, count * width)
            self._sync(start, signature)
            if count:
                target, piece = out[start : start + count], own[start : start + count]
                op(target, slots.views(piece, self.rank * stride, use_own=pair))

    def broadcast(self, signature: bytes, address: int, nbytes: int, *, root: int) -> None:
        """Copy ``nbytes`` at ``address`` of the root to ``address`` of all ranks."""
        for start, count in self.slots.rounds(nbytes, self.slots.round_nbytes):
            if self.rank == root:
                self.slots.put(0, address + start, count)
            self._sync(start, signature)
            if self.rank != root:
                self.slots.get(root, 0, target=address + start, nbytes=count)

    def all_gather(
        self, signature: bytes, source: int, *, nbytes: int, targets: Sequence[int] | None
    ) -> None:
        """Copy ``nbytes`` at ``source`` of rank r to ``targets[r]``. Without targets, only send."""
        targets = targets or ()
        others = [(rank, target) for rank, target in enumerate(targets) if rank != self.rank]
        ranges = [(target, nbytes) for _, target in others]
        buffer, [(source, _)] = copy_if_overlapping([(source, nbytes)], ranges)
        slots = self.slots
        if self.size == 2 and nbytes >= self._read.least_nbytes:  # reading is slower for more ranks
            slots.next()
            slots.write_integers([source])
            self._barrier.begin(signature)
            for rank, target in others:
                self._read(rank, slots.read_integers(rank, 1)[0], target=target, nbytes=nbytes)
            self._barrier.wait()
        else:
            for start, count in slots.rounds(nbytes, slots.round_nbytes):
                slots.put(0, source + start, count)
                self._sync(start, signature)
                for rank, target in others:
                    slots.get(rank, 0, target=target + start, nbytes=count)
        if targets and targets[self.rank] != source:
            memmove(targets[self.rank], source, nbytes)
        del buffer  # no rank reads it any more

    def scatter(
        self, signature: bytes, sources: Sequence[int], *, nbytes: int, target: int, root: int
    ) -> None:
        """Copy ``nbytes`` at the root's ``sources[r]`` to ``target`` of rank r, for all r."""
        if nbytes >= self._read.least_nbytes:
            self._scatter_by_reading(signature, sources, nbytes=nbytes, target=target, root=root)
            return
        part = self.slots.part_nbytes()
        for start, count in self.slots.rounds(nbytes, part):
            for rank, source in enumerate(sources):
                if rank != root:
                    self.slots.put(part_index(root, rank) * part, source + start, count)
            self._sync(start, signature)
            if self.rank != root:
                offset = part_index(root, self.rank) * part
                self.slots.get(root, offset, target=target + start, nbytes=count)
        if sources:
            memmove(target, sources[root], nbytes)

    def _scatter_by_reading(
        self, signature: bytes, sources: Sequence[int], *, nbytes: int, target: int, root: int
    ) -> None:
        others = [(source, nbytes) for rank, source in enumerate(sources) if rank != root]
        buffer, readable = copy_if_overlapping(others, [(target, nbytes)])
        self.slots.next()
        self.slots.write_integers([address for address, _ in readable])
        self._barrier.begin(signature)
        if self.rank == root:
            memmove(target, sources[root], nbytes)
        else:
            addresses = self.slots.read_integers(root, self.size - 1)
            address = addresses[part_index(root, self.rank)]
            self._read(root, address, target=target, nbytes=nbytes)
        self._barrier.wait()
        del buffer  # no rank reads it any more

    def all_to_all(
        self, signature: bytes, sources: Sequence[MemoryRange], targets: Sequence[MemoryRange]
    ) -> None:
        """Send ``sources[r]`` to rank r, and receive ``targets[r]`` from it, for all r.

        1. Write a table into the slot: bytes to each rank, bytes from each rank, source addresses.
        2. Send short parts through the slots, in as many rounds as the longest one needs. After
           the first barrier, check that all tables agree.
        3. Read long parts from the senders' memory, and wait at the barrier.

        Raises:
            LayoutMismatch: a rank sends another size than expected. All ranks raise it.
        """
        size, slots = self.size, self.slots
        head = -(-24 * size // ALIGN) * ALIGN
        part = slots.part_nbytes(head)
        buffer, sources = copy_if_overlapping(sources, targets)
        tables: list[list[int]] = []
        start, longest = 0, 1
        while start < longest:
            slots.next()
            if start == 0:
                sizes = [n for _, n in sources] + [n for _, n in targets]
                slots.write_integers([*sizes, *(address for address, _ in sources)])
            for rank, source, count in self._short_pieces(sources, start, part):
                slots.put(head + part_index(self.rank, rank) * part, source, count)
            self._sync(start, signature)
            if start == 0:
                tables = [slots.read_integers(rank, 3 * size) for rank in range(size)]
                longest = self._check_tables(tables)
            for rank, target, count in self._short_pieces(targets, start, part):
                offset = head + part_index(rank, self.rank) * part
                slots.get(rank, offset, target=target, nbytes=count)
            start += part
        memmove(targets[self.rank][0], *sources[self.rank])
        if any(n >= self._read.least_nbytes for table in tables for n in table[:size]):
            for rank, (target, nbytes) in enumerate(targets):
                if nbytes >= self._read.least_nbytes and rank != self.rank:
                    address = tables[rank][2 * size + self.rank]
                    self._read(rank, address, target=target, nbytes=nbytes)
            self._barrier.wait()
        del buffer  # no rank reads it any more

    def _short_pieces(
        self, parts: Sequence[MemoryRange], start: int, most: int
    ) -> list[tuple[int, int, int]]:
        """Return (rank, address, bytes) of what a round copies of other ranks' short parts."""
        return [
            (rank, address + start, min(most, nbytes - start))
            for rank, (address, nbytes) in enumerate(parts)
            if start < nbytes < self._read.least_nbytes and rank != self.rank
        ]

    def _check_tables(self, tables: Sequence[Sequence[int]]) -> int:
        """Raise LayoutMismatch if sizes differ. Return the bytes of the longest short part."""
        names, longest = self._barrier.headers.names, 0
        for sender, table in enumerate(tables):
            for receiver, nbytes in enumerate(table[: self.size]):
                expected = tables[receiver][self.size + sender]
                if nbytes != expected:
                    raise LayoutMismatch(
                        f"all_to_all: rank {names[sender]} sends {nbytes} bytes to rank "
                        f"{names[receiver]}, which expects {expected}; the sizes must agree"
                    )
                if nbytes < self._read.least_nbytes:
                    longest = max(longest, nbytes)
        return longest


@lru_cache(maxsize=1024)
def _in_place_signature(signature: bytes, buffer: int, offset: int) -> bytes:
    """Return the signature, extended by the position of the elements in a shared buffer."""
    return op_signature(f"{signature.decode().strip()} in place at {buffer}+{offset}")


def copy_if_overlapping(
    sources: Sequence[MemoryRange], targets: Sequence[MemoryRange]
) -> tuple[Tensor | None, Sequence[MemoryRange]]:
    """Copy the sources if one overlaps a target, because targets are written while ranks read.

    Returns:
        The buffer of the copies, to be kept while ranks read, or None if nothing was copied. The
        second value is the sources to use.
    """
    if not _overlap(sources, targets):
        return None, sources
    buffer = torch.empty(sum(nbytes for _, nbytes in sources), dtype=torch.uint8)
    copies, address = [], buffer.data_ptr()
    for source, nbytes in sources:
        memmove(address, source, nbytes)
        copies.append((address, nbytes))
        address += nbytes
    return buffer, copies


def _overlap(sources: Sequence[MemoryRange], targets: Sequence[MemoryRange]) -> bool:
    """Return whether a source overlaps a target. Sources may overlap each other."""
    ranges = [(a, a + n, kind) for kind, rs in enumerate((sources, targets)) for a, n in rs if n]
    ends = [0, 0]  # the highest end so far of the sources, and of the targets
    for begin, end, kind in sorted(ranges):
        if begin < ends[1 - kind]:
            return True
        ends[kind] = max(ends[kind], end)
    return False
