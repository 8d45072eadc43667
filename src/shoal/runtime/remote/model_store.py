"""What a server of ssp and asp has: the model, its optimizer, and the workers' clocks.

No sockets and no threads here, so that it is tested and simulated as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.flow import Add
from shoal.runtime.step.buffers import real


class Clocks:
    """The number of steps of each worker; a worker may be ``bound`` ahead of the slowest."""

    def __init__(self, workers: Sequence[int], bound: float) -> None:
        self.at, self.bound = dict.fromkeys(workers, 0), bound

    def tick(self, worker: int) -> None:
        """Count a step of a worker."""
        self.at[worker] += 1

    def leave(self, worker: int) -> None:
        """Remove a worker, so that no other waits for it."""
        self.at.pop(worker, None)

    def may_go(self, worker: int) -> bool:
        """Whether a worker may start its next step (SSP: c - min c_j <= bound)."""
        return worker not in self.at or self.at[worker] - min(self.at.values()) <= self.bound


class ServerModel:
    """The model on a server, and the only optimizer that updates it.

    Each push is one optimizer step with the pushed gradient divided by the number of workers, so
    that one step of all workers moves the model as far as one step of bsp (for plain SGD). ``add``
    is the compressor's, which decodes a message.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], optimizer: Optimizer, *, add: Add, workers: int
    ) -> None:
        self.parameters, self.optimizer, self.add = parameters, optimizer, add
        self.workers = workers
        self.updates = 0

    def push(self, messages: Mapping[str, tuple[Tensor, ...]]) -> None:
        """Decode a worker's messages into gradients and take one optimizer step."""
        for name, message in messages.items():
            parameter = self.parameters[name]
            grad = torch.zeros_like(parameter)
            self.add(message, real(grad), 1 / self.workers)
            parameter.grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1

    def model(self) -> dict[str, Tensor]:
        """Return the current parameters."""
        return {name: p.detach() for name, p in self.parameters.items()}

    def retune(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Set the hyper-parameters of a worker, whose scheduler may have changed them."""
        for own, theirs in zip(self.optimizer.param_groups, groups, strict=True):
            own.update({k: v for k, v in theirs.items() if k in own and k != "params"})
