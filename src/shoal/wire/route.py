"""Run an all-reduce along a route given as data: rounds of (source, target, chunk, add).

It knows no collective by name; any that is proved will do. In a round, all chunks for one peer
travel as one message, as the price assumes. Messages between two ranks arrive in the order in which
they were sent, and every rank walks the rounds in the same order, so all-reduces may follow each
other with no barrier between; those that run at the same time (threads) need a ``tag`` each.

Blocking: whoever wants overlap calls it from a communication thread.

An all-reduce in two halves, in place: sums are scattered now, and gathered when they are needed.

Both run round a ring by point-to-point messages, so that a tensor of any length will do and no
copy is made. Blocking: whoever wants overlap calls them from a communication thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import BadArgument

PlainCopy = tuple[int, int, int, bool]
"""(source, target, chunk, add)."""


class Leg(NamedTuple):
    """What one rank does in one round: peer -> chunks to send; peer -> (chunk, add) to take in."""

    sends: dict[int, list[int]]
    receives: dict[int, list[tuple[int, bool]]]


def legs(rounds: Iterable[Sequence[PlainCopy]], rank: int) -> tuple[Leg, ...]:
    """The part of ``rank`` in these rounds; rounds in which it is idle are left out."""
    mine = []
    for copies in rounds:
        leg = Leg({}, {})
        for source, target, chunk, add in copies:
            if source == rank:
                leg.sends.setdefault(target, []).append(chunk)
            if target == rank:
                leg.receives.setdefault(source, []).append((chunk, add))
        if leg.sends or leg.receives:
            mine.append(leg)
    return tuple(mine)


def run_rounds(
    tensor: Tensor,
    rounds: Iterable[Sequence[PlainCopy]],
    *,
    chunks: int,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
) -> None:
    """Sum a flat tensor over the group in place, along these rounds.

    Args:
        tensor: one-dimensional and contiguous, of the same size on every rank; may be empty.
        rounds: of the whole group, ranks counted within the group.
        chunks: into how many nearly equal chunks the tensor is cut.
        group: None for all ranks.
        tag: tells apart all-reduces that run at the same time.
    """
    run_legs(tensor, legs(rounds, dist.get_rank(group)), chunks=chunks, group=group, tag=tag)


def run_legs(
    tensor: Tensor,
    mine: Iterable[Leg],
    *,
    chunks: int,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
) -> None:
    """Like :func:`run_rounds`, with this rank's legs worked out once and used again."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise BadArgument(f"run_rounds(tensor of {tuple(tensor.shape)})", "needs a flat tensor")
    if chunks < 1:
        raise BadArgument(f"run_rounds(chunks={chunks})", "needs at least one chunk")
    cut = RouteCut(tensor, chunks)
    for leg in mine:
        _run_leg(cut, leg, group or dist.group.WORLD, tag)


class RouteCut(NamedTuple):
    """A flat tensor in chunks whose sizes differ by one at most; some may be empty."""

    tensor: Tensor
    chunks: int

    def part(self, first: int, count: int = 1) -> Tensor:
        """A view of ``count`` chunks that lie side by side."""
        n = self.tensor.numel()
        return self.tensor[first * n // self.chunks : (first + count) * n // self.chunks]

    def message(self, chunks: Sequence[int]) -> Tensor:
        """These chunks in one piece: a view where they lie side by side, else a copy."""
        if _side_by_side(chunks):
            return self.part(chunks[0], len(chunks))
        return torch.cat([self.part(chunk) for chunk in chunks])


def _side_by_side(chunks: Sequence[int]) -> bool:
    return all(after == before + 1 for before, after in pairwise(chunks))


def _run_leg(cut: RouteCut, leg: Leg, group: dist.ProcessGroup | None, tag: int) -> None:
    ops: list[dist.P2POp] = []
    arrivals: list[tuple[Tensor, list[tuple[int, bool]]]] = []
    for peer, takes in leg.receives.items():
        buffer = _place(cut, leg, takes)
        if buffer is None:  # what is sent in a round is what was held before it
            buffer = cut.tensor.new_empty(sum(cut.part(chunk).numel() for chunk, _ in takes))
            arrivals.append((buffer, takes))
        if buffer.numel():
            ops.append(dist.P2POp(dist.irecv, buffer, group=group, tag=tag, group_peer=peer))
    for peer, gives in leg.sends.items():
        message = cut.message(gives)
        if message.numel():  # both ends know that an empty one is not sent
            ops.append(dist.P2POp(dist.isend, message, group=group, tag=tag, group_peer=peer))
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    for buffer, takes in arrivals:
        take_in(cut, buffer, takes)


def _place(cut: RouteCut, leg: Leg, takes: list[tuple[int, bool]]) -> Tensor | None:
    """Where a message can be received at once: nothing is added, and nothing there is sent."""
    chunks = [chunk for chunk, _ in takes]
    leaving = {chunk for gives in leg.sends.values() for chunk in gives}
    if any(add for _, add in takes) or leaving.intersection(chunks) or not _side_by_side(chunks):
        return None
    return cut.part(chunks[0], len(chunks))


def take_in(cut: RouteCut, buffer: Tensor, takes: list[tuple[int, bool]]) -> None:
    """Put a message's chunks, or add them, where they belong."""
    chunks = [chunk for chunk, _ in takes]
    if all(add for _, add in takes) and _side_by_side(chunks):
        cut.part(chunks[0], len(chunks)).add_(buffer)
        return
    sizes = [cut.part(chunk).numel() for chunk in chunks]
    for (chunk, add), arrived in zip(takes, torch.split(buffer, sizes), strict=True):
        if add:
            cut.part(chunk).add_(arrived)
        else:
            cut.part(chunk).copy_(arrived)


class Halves:
    """The two halves of a ring's rounds, for one rank of a group.

    Args:
        group: None for all ranks.
        rounds: of an all-reduce whose first half scatters sums, and whose second gathers them.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, rounds: Sequence[Sequence[PlainCopy]]
    ) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        rank = dist.get_rank(group)
        self._first = legs(rounds[: len(rounds) // 2], rank)
        self._second = legs(rounds[len(rounds) // 2 :], rank)

    def scatter(self, tensor: Tensor) -> Tensor:
        """Each rank ends with the sum of one chunk; the rest is half done."""
        run_legs(tensor, self._first, chunks=self._size, group=self._group)
        return tensor

    def spread(self, tensor: Tensor) -> Tensor:
        """All ranks end with all sums."""
        run_legs(tensor, self._second, chunks=self._size, group=self._group)
        return tensor
