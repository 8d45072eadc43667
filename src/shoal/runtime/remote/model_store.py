"""The state of a server for ssp and asp: the model, its optimizer, and the workers' step counts.

This module uses no sockets and no threads, so that tests and the simulator can use it directly.
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
    """Counts steps. No worker may start a step more than ``bound`` ahead of the slowest worker."""

    def __init__(self, workers: Sequence[int], bound: float) -> None:
        self.steps, self.bound = dict.fromkeys(workers, 0), bound

    def tick(self, worker: int) -> None:
        """Count one more step of a worker."""
        self.steps[worker] += 1

    def leave(self, worker: int) -> None:
        """Remove a worker that has left, so that no other worker waits for it."""
        self.steps.pop(worker, None)

    def may_go(self, worker: int) -> bool:
        """Whether a worker has left, or is at most ``bound`` steps ahead of the slowest."""
        slowest = min(self.steps.values(), default=0)
        return worker not in self.steps or self.steps[worker] - slowest <= self.bound


class ServerModel:
    """The model on a server, and the optimizer that updates it.

    Each push makes one optimizer step with the pushed gradient divided by the number of workers.
    With plain SGD, one push of every worker thus changes the model about as much as one bsp step.
    ``add`` is the compressor's function that decodes a message and adds it to a tensor.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], optimizer: Optimizer, *, add: Add, workers: int
    ) -> None:
        self.parameters, self.optimizer, self.add = parameters, optimizer, add
        self.workers = workers
        self.updates = 0

    def push(self, messages: Mapping[str, tuple[Tensor, ...]]) -> None:
        """Decode a worker's messages into gradients, by name, and take one optimizer step."""
        for name, message in messages.items():
            parameter = self.parameters[name]
            grad = torch.zeros_like(parameter)
            self.add(message, real(grad), 1 / self.workers)
            parameter.grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1

    def model(self) -> dict[str, Tensor]:
        """Return the current parameters by name, detached but not copied."""
        return {name: p.detach() for name, p in self.parameters.items()}

    def retune(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Copy a worker's hyper-parameters, which a scheduler may change, to this optimizer."""
        for own, worker_group in zip(self.optimizer.param_groups, groups, strict=True):
            own.update({k: v for k, v in worker_group.items() if k in own and k != "params"})
