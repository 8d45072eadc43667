"""D-PSGD: parameters travel to the neighbours while the gradient is computed.

With a compressor that tracks (CHOCO-SGD) public copies of models are mixed in place of models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.axes.compression import Trait
from shoal.runtime.step.exchange import Exchange
from shoal.runtime.step.modes.mode import Apply, Asks, Parameters


class MixingMode:
    """x_i <- sum_j W_ij x_j - my step; exchange and gradient overlap.

    Where copies x^ travel, x_i <- x_i + gamma sum_j W_ij (x^_j - x^_i) - my step.

    Args:
        parameters: the model, updated in place.
        models: the agreement on the model: the wire answers with my row of W.
        period: steps between exchanges.
    """

    gradients = None
    agrees = False

    def __init__(self, parameters: Parameters, models: Exchange, period: int) -> None:
        self.parameters = parameters
        self.models = models
        self.period = period
        self.steps = 0
        self.before: dict[str, torch.Tensor] = {}
        models.moves = Trait.TRACKS in models.compressor.traits
        self.gamma = models.compressor.gamma

    @torch.no_grad()
    def opening(self) -> list[Asks]:
        """Send the model as it is at the start of the step."""
        if not self.due():
            return []
        for name, p in self.parameters.items():
            self.models.flats.places[name].view.copy_(p)
        if not self.models.moves:
            self.before = {name: p.detach().clone() for name, p in self.parameters.items()}
        return [self.models.flow(index) for index in range(len(self.models.tasks))]

    @torch.no_grad()
    def closing(self, apply: Apply) -> Asks:
        """Take my step, then move by what mixing changed."""
        due = self.due()
        with torch.enable_grad():
            apply()
        self.steps += 1
        if due:
            for name, p in self.parameters.items():
                told = self.models.flats.places[name].view
                p += self.gamma * told if self.models.moves else told - self.before[name]
            self.before = {}
            self.models.end_round()
        yield from ()

    def due(self) -> bool:
        """Whether the running step mixes."""
        return (self.steps + 1) % self.period == 0

    def state_dict(self) -> dict[str, Any]:
        """Steps, rounds, and the copies where such travel."""
        return {"steps": self.steps, "models": self.models.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where ``state_dict`` left off; of an empty state, begin anew."""
        self.steps = int(state.get("steps", 0))
        self.models.load_state_dict(state.get("models", {}))
