"""All-reduce along a route that is given as data: rounds of (source, target, chunk, add).

This module knows no algorithm by name: ring, tree and butterfly are only different rounds. In a
round, all chunks for one peer travel as one message, which is what the cost model assumes. Messages
between two ranks arrive in the order sent, and every rank follows the rounds in the same order, so
all-reduces may follow each other without a barrier. Those that run at the same time, in several
threads, each need their own ``tag``.

All functions block; for overlap call them from a communication thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import BadArgument

Group = dist.ProcessGroup | None
"""None for all ranks."""
PlainCopy = tuple[int, int, int, bool]
"""(source, target, chunk, add)."""


class Leg(NamedTuple):
    """One rank's part in one round: peer -> chunks to send; peer -> (chunk, add) to receive."""

    sends: dict[int, list[int]]
    receives: dict[int, list[tuple[int, bool]]]


def legs(rounds: Iterable[Sequence[PlainCopy]], rank: int) -> tuple[Leg, ...]:
    """Return the part of ``rank`` in these rounds, without the rounds in which it is idle."""
    own = []
    for copies in rounds:
        leg = Leg({}, {})
        for source, target, chunk, add in copies:
            if source == rank:
                leg.sends.setdefault(target, []).append(chunk)
            if target == rank:
                leg.receives.setdefault(source, []).append((chunk, add))
        if leg.sends or leg.receives:
            own.append(leg)
    return tuple(own)


def run_legs(
    tensor: Tensor, own_legs: Iterable[Leg], *, chunks: int, group: Group = None, tag: int = 0
) -> None:
    """Sum a flat contiguous tensor over the group in place, along a route.

    ``own_legs`` are this rank's legs of the route, which divides the tensor into ``chunks``. The
    tensor has the same size on every rank, and may be empty.
    """
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise BadArgument(f"run_legs(tensor of {tuple(tensor.shape)})", "needs a flat tensor")
    if chunks < 1:
        raise BadArgument(f"run_legs(chunks={chunks})", "needs at least one chunk")
    cut = RouteCut(tensor, chunks)
    for leg in own_legs:
        _run_leg(cut, leg, group or dist.group.WORLD, tag)


class RouteCut(NamedTuple):
    """A flat tensor divided into chunks whose sizes differ by at most one; some may be empty."""

    tensor: Tensor
    chunks: int

    def part(self, first: int, count: int = 1) -> Tensor:
        """Return a view of ``count`` adjacent chunks."""
        n = self.tensor.numel()
        return self.tensor[first * n // self.chunks : (first + count) * n // self.chunks]

    def message(self, chunks: Sequence[int]) -> Tensor:
        """Return these chunks as one tensor: a view if they are adjacent, else a copy."""
        if _adjacent(chunks):
            return self.part(chunks[0], len(chunks))
        return torch.cat([self.part(chunk) for chunk in chunks])


def _adjacent(chunks: Sequence[int]) -> bool:
    return all(after == before + 1 for before, after in pairwise(chunks))


def _run_leg(cut: RouteCut, leg: Leg, group: Group, tag: int) -> None:
    """Receive and send at the same time; a rank sends what it had before the round."""
    ops: list[dist.P2POp] = []
    arrivals: list[tuple[Tensor, list[tuple[int, bool]]]] = []
    for peer, receives in leg.receives.items():
        buffer = _direct_buffer(cut, leg, receives)
        if buffer is None:
            buffer = cut.tensor.new_empty(sum(cut.part(chunk).numel() for chunk, _ in receives))
            arrivals.append((buffer, receives))
        if buffer.numel():
            ops.append(dist.P2POp(dist.irecv, buffer, group=group, tag=tag, group_peer=peer))
    for peer, chunks in leg.sends.items():
        message = cut.message(chunks)
        if message.numel():  # both ends know that an empty message is not sent
            ops.append(dist.P2POp(dist.isend, message, group=group, tag=tag, group_peer=peer))
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    for buffer, receives in arrivals:
        write_chunks(cut, buffer, receives)


def _direct_buffer(cut: RouteCut, leg: Leg, receives: list[tuple[int, bool]]) -> Tensor | None:
    """Return the chunks themselves as buffer, if nothing is added to them and none is sent."""
    chunks = [chunk for chunk, _ in receives]
    sent = {chunk for message in leg.sends.values() for chunk in message}
    if any(add for _, add in receives) or sent.intersection(chunks) or not _adjacent(chunks):
        return None
    return cut.part(chunks[0], len(chunks))


def write_chunks(cut: RouteCut, buffer: Tensor, receives: list[tuple[int, bool]]) -> None:
    """Copy the chunks of a received message into the tensor, or add them to it."""
    chunks = [chunk for chunk, _ in receives]
    if all(add for _, add in receives) and _adjacent(chunks):
        cut.part(chunks[0], len(chunks)).add_(buffer)
        return
    sizes = [cut.part(chunk).numel() for chunk in chunks]
    for (chunk, add), values in zip(receives, torch.split(buffer, sizes), strict=True):
        if add:
            cut.part(chunk).add_(values)
        else:
            cut.part(chunk).copy_(values)


class Halves:
    """An all-reduce in two halves, in place: reduce-scatter now, all-gather when it is needed.

    Unlike torch's collectives, they take a tensor of any length and make no copy. ``rounds`` are
    those of a ring: the first half of them is a reduce-scatter, the second an all-gather.
    """

    def __init__(self, group: Group, rounds: Sequence[Sequence[PlainCopy]]) -> None:
        self._group, self._size = group, dist.get_world_size(group)
        rank = dist.get_rank(group)
        self._first = legs(rounds[: len(rounds) // 2], rank)
        self._second = legs(rounds[len(rounds) // 2 :], rank)

    def scatter(self, tensor: Tensor) -> Tensor:
        """Reduce-scatter: each rank ends with the sum of one chunk; the others are partial sums."""
        run_legs(tensor, self._first, chunks=self._size, group=self._group)
        return tensor

    def spread(self, tensor: Tensor) -> Tensor:
        """All-gather: all ranks end with all sums."""
        run_legs(tensor, self._second, chunks=self._size, group=self._group)
        return tensor
