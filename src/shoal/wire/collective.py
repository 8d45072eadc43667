"""The wire of a process group: sums by all-reduce, messages by all-gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import UsageError
from shoal.flow import All, Ask, Fold, Gather, Mean, Rows, Scatter, Spread
from shoal.wire.folding import fold
from shoal.wire.halves import Halves
from shoal.wire.pending import Pending, Several, There, Works, gather_flat, pack, unpack

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
                return There(self._rows(tensor))
            case Scatter(tensor) if self.halves is not None:
                return There(self.halves.scatter(tensor))
            case Spread(tensor) if self.halves is not None:
                return There(self._scaled(self.halves.spread(tensor)))
            case Fold():
                return There(fold([ask], self.group)[0])
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
            return There(tensor)
        if self.route is not None:
            self.route(flat.view(-1))
            return There(self._scaled(flat).view(tensor.shape))
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        return Works((work,) if work else (), lambda: self._scaled(flat))

    def _scaled(self, total: Tensor) -> Tensor:
        return total if self.weighted else total.div_(self.size)

    def _gather(self, asks: Sequence[Gather]) -> Pending:
        parts = [part for ask in asks for part in ask.parts]
        mine = pack(parts)
        everyone = mine.new_empty(self.size, mine.numel())
        work = gather_flat(everyone.view(-1), mine, group=self.group, async_op=True)
        return Works((work,) if work else (), lambda: self._decode(asks, parts, everyone))

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
            return Several((self.ask(asks[0]),))
        sums = [ask for ask in asks if isinstance(ask, Mean)]
        gathers = [ask for ask in asks if isinstance(ask, Gather)]
        folds = [ask for ask in asks if isinstance(ask, Fold)]
        if len(gathers) == len(asks):
            return self._gather(gathers)
        if len(folds) == len(asks):
            return There(fold(folds, self.group))
        if len({ask.tensor.dtype for ask in sums}) == 1 and len(sums) == len(asks):
            return self._fused(sums)
        return Several(tuple(self.ask(ask) for ask in asks))

    def _fused(self, asks: Sequence[Mean]) -> Pending:
        shapes = [ask.tensor.shape for ask in asks]
        flat = torch.cat([ask.tensor.detach().reshape(-1) for ask in asks])
        under_way = self._mean(flat)

        def finish() -> tuple[Tensor, ...]:
            sizes = [shape.numel() for shape in shapes]
            cut = under_way.wait().split(sizes)
            return tuple(part.view(shape) for part, shape in zip(cut, shapes, strict=True))

        return Works((), finish)
