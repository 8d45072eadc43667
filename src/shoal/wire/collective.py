"""The wire of a process group: sums by all-reduce, messages by all-gather.

Merge messages pairwise up a tree, then tell the root's to all: how a process group answers Fold.

Blocking: whoever wants overlap asks from a communication thread. All asks of one message take the
same hops, so each hop is one send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import UsageError
from shoal.flow import All, Ask, Fold, Folded, Gather, Mean, Rows, Scatter, Spread, tree
from shoal.wire.route import Halves
from shoal.wire.wire import (
    Pending,
    PendingAll,
    PendingWork,
    Ready,
    gather_flat,
    pack,
    unpack,
)

Route: TypeAlias = Callable[[Tensor], None]
"""Sums a flat tensor over the group, in place, by some route of its own."""


class CollectiveWire:
    """Answers asks with collectives of a torch process group, under way while backward computes.

    Args:
        group: the workers taking part.
        weighted: contributions come scaled by weights that sum to one, so that the mean is the sum.
        route: sums by this in place of the backend's all-reduce.
        halves: sums by this where they are first scattered, and gathered later.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        weighted: bool = False,
        route: Route | None = None,
        halves: Halves | None = None,
    ) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.weighted = weighted
        self.route = route
        self.halves = halves
        self.blocks = route is not None

    def ask(self, ask: Ask) -> Pending:
        """Issue one ask, or several as one message."""
        match ask:
            case Mean(tensor):
                return self._mean(tensor)
            case Gather():
                return self._gather([ask])
            case Rows(tensor):
                return Ready(self._rows(tensor))
            case Scatter(tensor) if self.halves is not None:
                return Ready(self.halves.scatter(tensor))
            case Spread(tensor) if self.halves is not None:
                return Ready(self._scaled(self.halves.spread(tensor)))
            case Fold():
                return Ready(fold([ask], self.group)[0])
            case All(asks):
                return self._all(asks)
            case _:
                raise UsageError(f"{type(ask).__name__}: a collective cannot answer it")

    def leave(self) -> None:
        """Nothing to say goodbye to."""

    def _mean(self, tensor: Tensor) -> Pending:
        flat = tensor.detach()
        if not flat.is_contiguous():
            flat = flat.contiguous()
        if flat.numel() == 0:
            return Ready(tensor)
        if self.route is not None:
            self.route(flat.view(-1))
            return Ready(self._scaled(flat).view(tensor.shape))
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        return PendingWork((work,) if work else (), lambda: self._scaled(flat))

    def _scaled(self, total: Tensor) -> Tensor:
        return total if self.weighted else total.div_(self.size)

    def _gather(self, asks: Sequence[Gather]) -> Pending:
        parts = [part for ask in asks for part in ask.parts]
        mine = pack(parts)
        everyone = mine.new_empty(self.size, mine.numel())
        work = gather_flat(everyone.view(-1), mine, group=self.group, async_op=True)
        return PendingWork((work,) if work else (), lambda: self._decode(asks, parts, everyone))

    def _decode(self, asks: Sequence[Gather], parts: list[Tensor], everyone: Tensor) -> Any:
        means = [torch.zeros_like(ask.like) for ask in asks]
        weight = 1.0 if self.weighted else 1 / self.size
        for message in everyone:
            left = list(unpack(message, parts))
            for ask, mean in zip(asks, means, strict=True):
                count = len(ask.parts)
                ask.add(tuple(left[:count]), mean, weight)
                del left[:count]
        return means[0] if len(means) == 1 else tuple(means)

    def _rows(self, tensor: Tensor) -> Tensor:
        """Sizes first, for everyone may hold other rows; then indices and values, padded."""
        mine = tensor.detach().coalesce()
        count = torch.tensor([mine._nnz()], device=mine.device)
        counts = count.new_empty(self.size)
        gather_flat(counts, count, group=self.group)
        most = int(counts.max())
        indices = mine.indices().new_zeros(mine.sparse_dim(), most)
        indices[:, : mine._nnz()] = mine.indices()
        values = mine.values().new_zeros(most, *mine.values().shape[1:])
        values[: mine._nnz()] = mine.values()  # padding adds zero to row 0
        parts = [indices, values]
        packed = pack(parts)
        everyone = packed.new_empty(self.size, packed.numel())
        gather_flat(everyone.view(-1), packed, group=self.group)
        found = [unpack(message, parts) for message in everyone]
        keep = [slice(int(c)) for c in counts]
        where = torch.cat([i[:, k] for (i, _), k in zip(found, keep, strict=True)], dim=1)
        what = torch.cat([v[k] for (_, v), k in zip(found, keep, strict=True)])
        total = torch.sparse_coo_tensor(where, what, mine.shape).coalesce()
        return total if self.weighted else total / self.size

    def _all(self, asks: tuple[Ask, ...]) -> Pending:
        if len(asks) == 1:
            return PendingAll((self.ask(asks[0]),))
        sums = [ask for ask in asks if isinstance(ask, Mean)]
        gathers = [ask for ask in asks if isinstance(ask, Gather)]
        folds = [ask for ask in asks if isinstance(ask, Fold)]
        if len(gathers) == len(asks):
            return self._gather(gathers)
        if len(folds) == len(asks):
            return Ready(fold(folds, self.group))
        if len({ask.tensor.dtype for ask in sums}) == 1 and len(sums) == len(asks):
            return self._fused(sums)
        return PendingAll(tuple(self.ask(ask) for ask in asks))

    def _fused(self, asks: Sequence[Mean]) -> Pending:
        shapes = [ask.tensor.shape for ask in asks]
        flat = torch.cat([ask.tensor.detach().reshape(-1) for ask in asks])
        under_way = self._mean(flat)

        def finish() -> tuple[Tensor, ...]:
            sizes = [shape.numel() for shape in shapes]
            cut = under_way.wait().split(sizes)
            return tuple(part.view(shape) for part, shape in zip(cut, shapes, strict=True))

        return PendingWork((), finish)


Parts = tuple[Tensor, ...]


def fold(asks: Sequence[Fold], group: dist.ProcessGroup | None) -> tuple[Folded, ...]:
    """What the group's messages became, and what I left out when I merged.

    Args:
        asks: mine, of one message; everybody's have the same sizes.
        group: None for all ranks.
    """
    me, workers = dist.get_rank(group), dist.get_world_size(group)
    like = [part for ask in asks for part in ask.parts]
    held = [ask.parts for ask in asks]
    dropped: list[list[Parts]] = [[] for _ in asks]
    for taker, giver in tree(workers):
        if me == giver:
            _send(held, taker, group)
        elif me == taker:
            theirs = _receive(asks, like, giver, group)
            for i, ask in enumerate(asks):
                held[i], out = ask.merge(held[i], theirs[i])
                dropped[i].append(out)
    agreed = _from_root(held, asks, like, group)
    return tuple(
        Folded(parts, tuple(out), workers) for parts, out in zip(agreed, dropped, strict=True)
    )


def _send(held: Sequence[Parts], to: int, group: dist.ProcessGroup | None) -> None:
    message = _packed(held)
    if message.numel():  # both ends know that an empty one is not sent
        dist.send(message, group=group, group_dst=to)


def _receive(
    asks: Sequence[Fold], like: list[Tensor], giver: int, group: dist.ProcessGroup | None
) -> list[Parts]:
    buffer = torch.empty_like(pack(like))
    if buffer.numel():
        dist.recv(buffer, group=group, group_src=giver)
    return _cut(unpack(buffer, like), asks)


def _from_root(
    held: Sequence[Parts], asks: Sequence[Fold], like: list[Tensor], group: dist.ProcessGroup | None
) -> list[Parts]:
    message = _packed(held)
    if message.numel():
        dist.broadcast(message, group=group, group_src=0)
    return _cut(unpack(message, like), asks)


def _packed(held: Sequence[Parts]) -> Tensor:
    return pack([part for parts in held for part in parts])


def _cut(parts: Parts, asks: Sequence[Fold]) -> list[Parts]:
    """The parts of each ask."""
    ends = accumulate((len(ask.parts) for ask in asks), initial=0)
    return [parts[start:stop] for start, stop in pairwise(ends)]
