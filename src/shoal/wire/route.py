"""All-reduce along a route, which is a list of rounds; a round is a list of copies between ranks.

Ring, tree and butterfly differ only in their rounds, so none has code of its own here. In a round,
a rank sends all chunks for one peer as one message, as the cost model assumes. Messages between two
ranks arrive in the order sent, and every rank runs the rounds in the same order, so no barrier is
needed between two all-reduces. All-reduces that run at the same time, in several threads, each need
their own ``tag``.

All functions block. For overlap, call these functions from a communication thread.
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
"""A process group. None is the group of all ranks."""
CopyTuple = tuple[int, int, int, bool]
"""(source rank, target rank, chunk index, add). If ``add`` is True, the target adds the chunk to
its own chunk, otherwise it replaces its own. ``Copy`` of the collectives has the same fields."""


class RankRound(NamedTuple):
    """One rank's part in one round."""

    sends: dict[int, list[int]]  # for each peer, the chunks to send to it
    receives: dict[int, list[tuple[int, bool]]]  # for each peer, the (chunk, add) to receive


def rank_rounds(rounds: Iterable[Sequence[CopyTuple]], rank: int) -> tuple[RankRound, ...]:
    """Return the part of ``rank`` in each round, without the rounds in which it does nothing."""
    own = []
    for copies in rounds:
        own_round = RankRound({}, {})
        for source, target, chunk, add in copies:
            if source == rank:
                own_round.sends.setdefault(target, []).append(chunk)
            if target == rank:
                own_round.receives.setdefault(source, []).append((chunk, add))
        if own_round.sends or own_round.receives:
            own.append(own_round)
    return tuple(own)


def run_rounds(
    tensor: Tensor,
    own_rounds: Iterable[RankRound],
    *,
    chunks: int,
    group: Group = None,
    tag: int = 0,
) -> None:
    """Run this rank's rounds of a route on a flat contiguous tensor, in place.

    After all rounds of an all-reduce route, the tensor is the sum over the group. ``chunks`` is the
    number of chunks into which the route divides the tensor. All ranks of the route must call this
    together, with tensors of the same size, which may be empty.
    """
    if tensor.dim() != 1 or not tensor.is_contiguous():
        what = f"run_rounds(tensor of {tuple(tensor.shape)}, strides {tensor.stride()})"
        raise BadArgument(what, "the tensor must be flat (one-dimensional) and contiguous")
    if chunks < 1:
        raise BadArgument(f"run_rounds(chunks={chunks})", "chunks must be at least 1")
    chunked = ChunkedTensor(tensor, chunks)
    for own_round in own_rounds:
        _run_round(chunked, own_round, group or dist.group.WORLD, tag)


class ChunkedTensor(NamedTuple):
    """A flat tensor divided into chunks whose sizes differ by at most one. Some may be empty."""

    tensor: Tensor
    chunks: int

    def part(self, first: int, count: int = 1) -> Tensor:
        """Return a view of ``count`` adjacent chunks, beginning with chunk ``first``."""
        n = self.tensor.numel()
        return self.tensor[first * n // self.chunks : (first + count) * n // self.chunks]

    def message(self, chunks: Sequence[int]) -> Tensor:
        """Return these chunks as one tensor. It is a view if they are adjacent and ascending."""
        if _adjacent(chunks):
            return self.part(chunks[0], len(chunks))
        return torch.cat([self.part(chunk) for chunk in chunks])


def _adjacent(chunks: Sequence[int]) -> bool:
    return all(after == before + 1 for before, after in pairwise(chunks))


def _run_round(chunked: ChunkedTensor, own_round: RankRound, group: Group, tag: int) -> None:
    """Send and receive all messages of a round, then write extra buffers to the tensor."""
    ops: list[dist.P2POp] = []
    arrivals: list[tuple[Tensor, list[tuple[int, bool]]]] = []
    for peer, receives in own_round.receives.items():
        buffer = _direct_buffer(chunked, own_round, receives)
        if buffer is None:
            numel = sum(chunked.part(chunk).numel() for chunk, _ in receives)
            buffer = chunked.tensor.new_empty(numel)
            arrivals.append((buffer, receives))
        if buffer.numel():
            ops.append(dist.P2POp(dist.irecv, buffer, group=group, tag=tag, group_peer=peer))
    for peer, chunks in own_round.sends.items():
        message = chunked.message(chunks)
        if message.numel():  # sender and receiver both skip an empty message
            ops.append(dist.P2POp(dist.isend, message, group=group, tag=tag, group_peer=peer))
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    for buffer, receives in arrivals:
        write_chunks(chunked, buffer, receives)


def _direct_buffer(
    chunked: ChunkedTensor, own_round: RankRound, receives: list[tuple[int, bool]]
) -> Tensor | None:
    """Return a view of the chunks to receive, so that they need no other buffer.

    Return None if a chunk is to be added or is also sent in this round, or if the chunks are not
    adjacent and ascending.
    """
    chunks = [chunk for chunk, _ in receives]
    sent = {chunk for message in own_round.sends.values() for chunk in message}
    if any(add for _, add in receives) or sent.intersection(chunks) or not _adjacent(chunks):
        return None
    return chunked.part(chunks[0], len(chunks))


def write_chunks(chunked: ChunkedTensor, buffer: Tensor, receives: list[tuple[int, bool]]) -> None:
    """Write the chunks of a received message to the tensor: add if ``add`` is True, or copy."""
    chunks = [chunk for chunk, _ in receives]
    if all(add for _, add in receives) and _adjacent(chunks):
        chunked.part(chunks[0], len(chunks)).add_(buffer)
        return
    sizes = [chunked.part(chunk).numel() for chunk in chunks]
    for (chunk, add), values in zip(receives, torch.split(buffer, sizes), strict=True):
        if add:
            chunked.part(chunk).add_(values)
        else:
            chunked.part(chunk).copy_(values)


class TwoStepAllReduce:
    """An all-reduce in place, in two calls: first a reduce-scatter, later an all-gather.

    Unlike torch's collectives, the two calls accept a length that the number of ranks does not
    divide, and they need no second tensor, only a buffer of one chunk. ``rounds`` must be those of
    a ring. The first half of the rounds is the reduce-scatter, the second half is the all-gather.
    """

    def __init__(self, group: Group, rounds: Sequence[Sequence[CopyTuple]]) -> None:
        self._group, self._size = group, dist.get_world_size(group)
        rank = dist.get_rank(group)
        self._reduce_scatter_rounds = rank_rounds(rounds[: len(rounds) // 2], rank)
        self._all_gather_rounds = rank_rounds(rounds[len(rounds) // 2 :], rank)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Reduce-scatter in place. One chunk becomes the sum, the others become partial sums."""
        run_rounds(tensor, self._reduce_scatter_rounds, chunks=self._size, group=self._group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Copy the summed chunk of every rank into the tensor, and return the tensor."""
        run_rounds(tensor, self._all_gather_rounds, chunks=self._size, group=self._group)
        return tensor
