"""The wire of neighbours: my answer is my row of W times what my neighbours and I hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import UsageError
from shoal.flow import All, Ask, Gather, Mean
from shoal.wire.wire import Pending, PendingAll, PendingWork, Ready, pack, unpack


class NeighbourWire:
    """Answers by sends to and receives from neighbours only.

    Args:
        group: the workers in the graph.
        row: weight of each worker in my answer; zero is no neighbour.
    """

    blocks = False

    def __init__(self, group: dist.ProcessGroup | None, row: Tensor) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.me = dist.get_rank(group)
        self.weights = [float(w) for w in row]

    def ask(self, ask: Ask) -> Pending:
        """Issue one ask, or several messages as one."""
        match ask:
            case Mean(tensor):
                return self._mix(tensor)
            case Gather():
                return self._gather([ask])
            case All(asks):
                gathers = [one for one in asks if isinstance(one, Gather)]
                if len(gathers) == len(asks) > 1:
                    return self._gather(gathers)
                return PendingAll(tuple(self.ask(one) for one in asks))
            case _:
                raise UsageError(f"{type(ask).__name__}: neighbours cannot answer it")

    def leave(self) -> None:
        """Nothing to say goodbye to."""

    def _mix(self, tensor: Tensor) -> Pending:
        if tensor.numel() == 0:
            return Ready(tensor)
        mine = tensor.detach().contiguous()
        boxes, works = self._swap(mine)

        def finish() -> Tensor:
            mixed = mine * self.weights[self.me]
            for j, box in boxes.items():  # ascending: the same sum on every run
                mixed.add_(box, alpha=self.weights[j])
            return mixed

        return PendingWork(works, finish, signals=False)

    def _gather(self, asks: Sequence[Gather]) -> Pending:
        """Messages of all asks in one; each neighbour's is decoded with its weight."""
        parts = [part for ask in asks for part in ask.parts]
        mine = pack(parts)
        boxes, works = self._swap(mine) if mine.numel() else ({}, ())

        def finish() -> Any:
            said = {**boxes, self.me: mine} if mine.numel() else {self.me: mine}
            means = [torch.zeros_like(ask.like) for ask in asks]
            for j in sorted(said):
                left = list(unpack(said[j], parts))
                for ask, mean in zip(asks, means, strict=True):
                    ask.add(tuple(left[: len(ask.parts)]), mean, self.weights[j])
                    del left[: len(ask.parts)]
            return means[0] if len(means) == 1 else tuple(means)

        return PendingWork(works, finish, signals=False)

    def _swap(self, mine: Tensor) -> tuple[dict[int, Tensor], tuple[dist.Work, ...]]:
        """Send mine to each neighbour and receive theirs, ascending."""
        others = [j for j, w in enumerate(self.weights) if w and j != self.me]
        boxes = {j: torch.empty_like(mine) for j in others}
        works = []
        for j in others:  # order of pairs is the order of asks: gloo matches them by tag and order
            peer = dist.get_global_rank(self.group, j) if self.group is not None else j
            works.append(dist.isend(mine, peer, group=self.group))
            works.append(dist.irecv(boxes[j], peer, group=self.group))
        return boxes, tuple(w for w in works if w is not None)
