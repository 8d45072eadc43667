"""The wire of neighbours: my answer is my row of W times what my neighbours and I hold."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import UsageError
from shoal.flow import All, Ask, Mean
from shoal.wire.pending import Pending, Several, There, Works


class MixingWire:
    """Answers Mean by sends to and receives from neighbours only.

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
        """Issue one ask."""
        match ask:
            case Mean(tensor):
                return self._mix(tensor)
            case All(asks):
                return Several(tuple(self.ask(one) for one in asks))
            case _:
                raise UsageError(f"{type(ask).__name__}: neighbours mix, they do not gather")

    def leave(self) -> None:
        """Nothing to say goodbye to."""

    def _mix(self, tensor: Tensor) -> Pending:
        if tensor.numel() == 0:
            return There(tensor)
        mine = tensor.detach().contiguous()
        others = [j for j, w in enumerate(self.weights) if w and j != self.me]
        boxes = {j: torch.empty_like(mine) for j in others}
        works = []
        for j in others:  # order of pairs is the order of asks: gloo matches them by tag and order
            peer = dist.get_global_rank(self.group, j) if self.group is not None else j
            works.append(dist.isend(mine, peer, group=self.group))
            works.append(dist.irecv(boxes[j], peer, group=self.group))

        def finish() -> Tensor:
            mixed = mine * self.weights[self.me]
            for j in others:  # ascending: the same sum on every run
                mixed.add_(boxes[j], alpha=self.weights[j])
            return mixed

        return Works(tuple(w for w in works if w is not None), finish, signals=False)
