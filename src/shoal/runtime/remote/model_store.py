"""What a server holds: the model, its optimizer, and everyone's clock. Pure, so that it is tested
and simulated without a socket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.flow import Add
from shoal.runtime.step.buffers import real


class Clocks:
    """Who is how far, and who must wait.

    Args:
        workers: their numbers.
        bound: clocks that one may be ahead of the slowest.
    """

    def __init__(self, workers: Sequence[int], bound: float) -> None:
        self.at = dict.fromkeys(workers, 0)
        self.bound = bound

    def tick(self, worker: int) -> None:
        """A worker ended a step."""
        self.at[worker] += 1

    def leave(self, worker: int) -> None:
        """A worker is done; nobody waits for it any more."""
        self.at.pop(worker, None)

    def may_go(self, worker: int) -> bool:
        """Whether a worker may start its next step (SSP: c - min c_j <= bound)."""
        if worker not in self.at:
            return True
        return self.at[worker] - min(self.at.values()) <= self.bound


class ServerModel:
    """The model that counts and its only optimizer.

    Each push is one optimizer step with the pushed gradient over the number of workers, so that one
    clock of all workers moves the model as far as one step of bsp (for plain SGD).

    Args:
        parameters: by name, updated in place.
        optimizer: the user's own, over these parameters.
        add: how a message adds up.
        workers: how many push.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        add: Add,
        workers: int,
    ) -> None:
        self.parameters = parameters
        self.optimizer = optimizer
        self.add = add
        self.workers = workers
        self.updates = 0

    def push(self, parts: Mapping[str, tuple[Tensor, ...]]) -> None:
        """Decode a worker's messages and take one step."""
        for name, message in parts.items():
            parameter = self.parameters[name]
            grad = torch.zeros_like(parameter)
            self.add(message, real(grad), 1 / self.workers)
            parameter.grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1

    def model(self) -> dict[str, Tensor]:
        """The model as it is now."""
        return {name: p.detach() for name, p in self.parameters.items()}

    def retune(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over hyper-parameters (a worker's scheduler changed its learning rate)."""
        for mine, theirs in zip(self.optimizer.param_groups, groups, strict=True):
            mine.update({k: v for k, v in theirs.items() if k in mine and k != "params"})
