"""D-PSGD: mix the parameters with those of the neighbours while the gradient is computed.

With a compressor with ``Trait.TRACKS`` (CHOCO-SGD), workers mix public copies of the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.axes.compression import Trait
from shoal.flow import Asks
from shoal.runtime.step.modes.mode import Apply, Mode, ModeSetup, State


class MixingMode(Mode):
    """Worker i computes x_i <- sum_j W_ij x_j - step_i, the sum during forward and backward.

    With public copies x^, x_i <- x_i + gamma sum_j W_ij (x^_j - x^_i) - step_i. The wire computes
    the sum over j with row i of W. step_i is the change by the optimizer.
    """

    def __init__(self, setup: ModeSetup) -> None:
        super().__init__(setup)
        self.exchange = setup.exchange()
        self._sent: dict[str, torch.Tensor] = {}
        self.exchange.moves = Trait.TRACKS in self.exchange.compressor.traits
        self.gamma = self.exchange.compressor.gamma

    @torch.no_grad()
    def opening(self) -> list[Asks]:
        """Return the flows that mix the parameters as they are at the start of the step."""
        if not self.due():
            return []
        for name, p in self.parameters.items():
            self.exchange.flat.views[name].view.copy_(p)
        if not self.exchange.moves:
            self._sent = {name: p.detach().clone() for name, p in self.parameters.items()}
        return [self.exchange.flow(index) for index in range(len(self.exchange.buckets))]

    @torch.no_grad()
    def closing(self, apply: Apply) -> Asks:
        """Call ``apply``, then add the change by mixing to the parameters."""
        due = self.due()
        with torch.enable_grad():
            apply()
        self.steps += 1
        if due:
            for name, p in self.parameters.items():
                mixed = self.exchange.flat.views[name].view
                p += self.gamma * mixed if self.exchange.moves else mixed - self._sent[name]
            self._sent = {}
            self.exchange.end_round()
        yield from ()

    def state_dict(self) -> State:
        """Return the step count and the compressor's state (with TRACKS, the public copies)."""
        return {"steps": self.steps, "models": self.exchange.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` returned. An empty dict resets the state."""
        self.steps = int(state.get("steps", 0))
        self.exchange.load_state_dict(state.get("models", {}))
