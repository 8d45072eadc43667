"""The wire of a process group. A ``Mean`` is an all-reduce, a ``Gather`` is an all-gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import UsageError
from shoal.flow import All, Ask, Fold, Folded, Gather, Mean, Rows, Scatter, Spread, tree
from shoal.wire.route import Group, TwoStepAllReduce
from shoal.wire.wire import (
    Parts,
    Pending,
    PendingAll,
    PendingWork,
    Ready,
    gather_flat,
    mean_of_messages,
    pack,
    pack_all,
    unpack,
    unpack_all,
)

Route: TypeAlias = Callable[[Tensor], None]
"""A function that sums a flat tensor over the group in place, and returns when this is done."""


class CollectiveWire:
    """Answers asks by communication in a torch process group.

    ``Gather``, and ``Mean`` without ``route``, run in the background. All other asks block.

    Args:
        group: the process group. None is the group of all ranks.
        weighted: if True, each worker has scaled its messages by its weight, and the weights sum to
            one. Sums are then not divided by the number of workers.
        route: sums the tensor of a ``Mean``. If None, the backend's all-reduce sums it.
        two_step: answers ``Scatter`` and ``Spread``. If None, these asks raise UsageError.
    """

    def __init__(
        self,
        group: Group,
        *,
        weighted: bool = False,
        route: Route | None = None,
        two_step: TwoStepAllReduce | None = None,
    ) -> None:
        self.group, self.size, self.weighted = group, dist.get_world_size(group), weighted
        self.route, self.two_step, self.blocks = route, two_step, route is not None

    def ask(self, ask: Ask) -> Pending:
        """Begin to answer an ask. The asks of an ``All`` may be sent together (see ``_all``)."""
        match ask:
            case Mean(tensor):
                return self._mean(tensor)
            case Gather():
                return self._gather([ask])
            case Rows(tensor):
                return Ready(self._rows(tensor))
            case Scatter(tensor) if self.two_step is not None:
                return Ready(self.two_step.reduce_scatter(tensor))
            case Spread(tensor) if self.two_step is not None:
                return Ready(self._scaled(self.two_step.all_gather(tensor)))
            case Fold():
                return Ready(fold([ask], self.group)[0])
            case All(asks):
                return self._all(asks)
            case _:
                raise UsageError(f"a process group cannot answer the ask {type(ask).__name__}")

    def leave(self) -> None:
        """Do nothing, because the process group stays open after the wire."""

    def _mean(self, tensor: Tensor) -> Pending:
        flat = tensor.detach().contiguous()  # a contiguous tensor is reduced in place
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
        packed = pack_all(ask.parts for ask in asks)
        buffers = packed.new_empty(self.size, packed.numel())
        work = gather_flat(buffers.view(-1), packed, group=self.group, async_op=True)
        weight, works = 1.0 if self.weighted else 1 / self.size, (work,) if work else ()
        return PendingWork(works, lambda: mean_of_messages(asks, ((b, weight) for b in buffers)))

    def _rows(self, tensor: Tensor) -> Tensor:
        """Return the mean of sparse tensors, which may have different rows on each rank.

        1. Gather the number of rows of each rank.
        2. Pad the indices and values to the largest number of rows, and gather both.
        3. Remove the padding, and add the rows that have the same index.
        """
        own = tensor.detach().coalesce()
        count = torch.tensor([own._nnz()], device=own.device)
        counts = count.new_empty(self.size)
        gather_flat(counts, count, group=self.group)

        most = int(counts.max())
        indices = own.indices().new_zeros(own.sparse_dim(), most)
        indices[:, : own._nnz()] = own.indices()
        values = own.values().new_zeros(most, *own.values().shape[1:])
        values[: own._nnz()] = own.values()
        packed = pack([indices, values])
        buffers = packed.new_empty(self.size, packed.numel())
        gather_flat(buffers.view(-1), packed, group=self.group)

        messages = [unpack(buffer, [indices, values]) for buffer in buffers]
        sizes = [slice(int(n)) for n in counts]
        all_indices = torch.cat([i[:, n] for (i, _), n in zip(messages, sizes, strict=True)], dim=1)
        all_values = torch.cat([v[n] for (_, v), n in zip(messages, sizes, strict=True)])
        total = torch.sparse_coo_tensor(all_indices, all_values, own.shape).coalesce()
        return total if self.weighted else total / self.size

    def _all(self, asks: tuple[Ask, ...]) -> Pending:
        """Send the asks together if all are ``Gather``, all ``Fold``, or all ``Mean`` of one dtype.

        All other combinations are sent one ask after the other.
        """
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
        """Answer several means of one dtype with one all-reduce of the concatenated tensors."""
        shapes = [ask.tensor.shape for ask in asks]
        pending = self._mean(torch.cat([ask.tensor.detach().reshape(-1) for ask in asks]))

        def finish() -> tuple[Tensor, ...]:
            parts = pending.wait().split([shape.numel() for shape in shapes])
            return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))

        return PendingWork((), finish)


def fold(asks: Sequence[Fold], group: Group) -> tuple[Folded, ...]:
    """Merge the messages of all ranks pairwise along a binary tree, and wait for the result.

    1. Reduce: on each edge of the tree one rank sends what it has merged so far. The other rank
       merges this into its own message and keeps what the merge dropped. At the end rank 0 has the
       merge of all messages.
    2. Broadcast: rank 0 sends the result to all ranks.

    Each edge sends all asks in one message. Every ask must have the same sizes on all ranks.
    """
    rank, workers = dist.get_rank(group), dist.get_world_size(group)
    like = [ask.parts for ask in asks]
    merged = list(like)
    dropped: list[list[Parts]] = [[] for _ in asks]
    for target, source in tree(workers):
        if rank == source:
            message = pack_all(merged)
            if message.numel():  # sender and receiver both skip an empty message
                dist.send(message, group=group, group_dst=target)
        elif rank == target:
            buffer = torch.empty_like(pack_all(like))
            if buffer.numel():
                dist.recv(buffer, group=group, group_src=source)
            for i, theirs in enumerate(unpack_all(buffer, like)):
                merged[i], rest = asks[i].merge(merged[i], theirs)
                dropped[i].append(rest)

    result = pack_all(merged)
    if result.numel():
        dist.broadcast(result, group=group, group_src=0)
    return tuple(
        Folded(parts, tuple(rests), workers)
        for parts, rests in zip(unpack_all(result, like), dropped, strict=True)
    )
