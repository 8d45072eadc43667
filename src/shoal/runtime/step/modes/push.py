"""Push a gradient to the servers, pull what the model has become; wait for nobody else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shoal.flow import Push
from shoal.runtime.step.exchange import Exchange
from shoal.runtime.step.modes.mode import Apply, Asks, Parameters


class PushMode:
    """The server holds the model and the optimizer; a worker's own optimizer never steps.

    Args:
        parameters: the model, overwritten by what the server answers.
        pushes: my gradients and what compression remembers of them.
        collect: puts the gradients of the last backward into ``pushes``.
    """

    gradients = None
    agrees = False

    def __init__(
        self, parameters: Parameters, pushes: Exchange, collect: Callable[[], None]
    ) -> None:
        self.parameters = parameters
        self.pushes = pushes
        self.collect = collect

    def opening(self) -> list[Asks]:
        """Nothing travels before the gradient is complete."""
        return []

    def closing(self, apply: Apply) -> Asks:
        """Push, wait for the answer, take the server's model.

        What has no gradient is not pushed: the server's momentum must not move it. A step that is
        skipped pushes nothing, and is a tick of my clock all the same.
        """
        self.collect()
        here = {name for name, p in self.parameters.items() if p.grad is not None}
        model = yield Push(self.pushes.messages(here))
        with torch.no_grad():
            for name, value in model.items():
                self.parameters[name].copy_(value)
        for p in self.parameters.values():
            p.grad = None
        apply()  # on nothing: my optimizer only has to be seen stepping, by its schedulers

    def due(self) -> bool:
        """Never of all workers at once."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """The compressor's memory; the model is the server's to save."""
        return self.pushes.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where ``state_dict`` left off."""
        self.pushes.load_state_dict(state)
