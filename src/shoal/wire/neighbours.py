"""The wire of gossip: each worker averages only with its neighbours in a graph.

Worker i gets ``sum_j W[i, j] * message_j``, where W is the mixing matrix. Workers i and j exchange
no message if ``W[i, j]`` is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import UsageError
from shoal.flow import All, Ask, Gather, Mean
from shoal.wire.wire import Pending, PendingAll, PendingWork, Ready, mean_of_messages, pack_all


class NeighbourWire:
    """Answers asks by messages between neighbours. ``row`` is this worker's row of W."""

    blocks = False

    def __init__(self, group: dist.ProcessGroup | None, row: Tensor) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.weights = [float(w) for w in row]

    def ask(self, ask: Ask) -> Pending:
        """Begin to answer an ask. An ``All`` of only ``Gather`` asks is sent as one message."""
        match ask:
            case Mean(tensor):
                return self._mean(tensor)
            case Gather():
                return self._gather([ask])
            case All(asks):
                gathers = [one for one in asks if isinstance(one, Gather)]
                if len(gathers) == len(asks) > 1:
                    return self._gather(gathers)
                return PendingAll(tuple(self.ask(one) for one in asks))
            case _:
                raise UsageError(f"the gossip wire cannot answer the ask {type(ask).__name__}")

    def leave(self) -> None:
        """Do nothing, because the process group stays open after the wire."""

    def _mean(self, tensor: Tensor) -> Pending:
        if tensor.numel() == 0:
            return Ready(tensor)
        own = tensor.detach().contiguous()
        buffers, works = self._exchange(own)

        def finish() -> Tensor:
            mean = own * self.weights[self.rank]
            for j, buffer in buffers.items():  # ranks ascend, so all runs add in the same order
                mean.add_(buffer, alpha=self.weights[j])
            return mean

        return PendingWork(works, finish, signals=False)

    def _gather(self, asks: Sequence[Gather]) -> Pending:
        own = pack_all(ask.parts for ask in asks)
        buffers, works = self._exchange(own) if own.numel() else ({}, ())

        def finish() -> Any:
            messages = sorted({**buffers, self.rank: own}.items())
            return mean_of_messages(asks, ((buffer, self.weights[j]) for j, buffer in messages))

        return PendingWork(works, finish, signals=False)

    def _exchange(self, own: Tensor) -> tuple[dict[int, Tensor], tuple[dist.Work, ...]]:
        """Begin to send ``own`` to each neighbour and to receive its message, in rank order.

        Returns a receive buffer for each neighbour, and the works to wait for. gloo matches sends
        and receives between two ranks by their order, which is the order of the asks on both ranks.
        """
        neighbours = [j for j, w in enumerate(self.weights) if w and j != self.rank]
        buffers = {j: torch.empty_like(own) for j in neighbours}
        works = []
        for j in neighbours:
            peer = dist.get_global_rank(self.group, j) if self.group is not None else j
            works.append(dist.isend(own, peer, group=self.group))
            works.append(dist.irecv(buffers[j], peer, group=self.group))
        return buffers, tuple(w for w in works if w is not None)
