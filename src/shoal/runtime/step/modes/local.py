"""Several steps alone, then agree on what they changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.runtime.step.exchange import Exchange
from shoal.runtime.step.modes.mode import Apply, Asks, Parameters


class LocalMode:
    """Every ``period`` steps, x <- anchor + mean(x - anchor).

    The change travels, not the model, so that it may be compressed. With block momentum the move is
    ``rate`` of the mean change and ``momentum`` of the move before.

    Args:
        parameters: the model, updated in place.
        changes: the agreement on what the steps changed.
        period: steps between agreements.
        momentum: what is carried on of the move before.
        rate: how much of the mean change is taken.
    """

    gradients = None
    agrees = False

    def __init__(
        self,
        parameters: Parameters,
        changes: Exchange,
        *,
        period: int,
        momentum: float = 0.0,
        rate: float = 1.0,
    ) -> None:
        self.parameters, self._momentum, self._rate = parameters, momentum, rate
        self.changes = changes
        self.period = period
        self.steps = 0
        self.anchor = {name: p.detach().clone() for name, p in parameters.items()}
        kept = {} if (momentum, rate) == (0, 1) else parameters  # then the mean is the move
        self.moves = {name: torch.zeros_like(p.detach()) for name, p in kept.items()}

    def opening(self) -> list[Asks]:
        """Nothing travels before the step is done."""
        return []

    @torch.no_grad()
    def closing(self, apply: Apply) -> Asks:
        """Update; after the last step of a period, agree on the change."""
        with torch.enable_grad():
            apply()
        self.steps += 1
        if self.steps % self.period:
            return
        places = self.changes.flats.places
        for name, p in self.parameters.items():
            torch.sub(p, self.anchor[name], out=places[name].view)
        yield from self.changes.flows()
        for name, p in self.parameters.items():
            self.anchor[name] += self._move(name, places[name].view)
            p.copy_(self.anchor[name])

    def _move(self, name: str, change: Tensor) -> Tensor:
        if not self.moves:
            return change
        return self.moves[name].mul_(self._momentum).add_(change, alpha=self._rate)

    def due(self) -> bool:
        """Whether the running step is the last of its period."""
        return (self.steps + 1) % self.period == 0

    def state_dict(self) -> dict[str, Any]:
        """Steps since the start, the last agreed model and move, the compressor's memory."""
        state = {"steps": self.steps, "anchor": self.anchor, "changes": self.changes.state_dict()}
        return {**state, "moves": self.moves} if self.moves else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where ``state_dict`` left off; of an empty state, begin from the model as is."""
        self.steps = int(state.get("steps", 0))
        for name, value in state.get("anchor", self.parameters).items():
            self.anchor[name].copy_(value.detach())
        moved = state.get("moves", {})
        for name, move in self.moves.items():
            if name in moved:
                move.copy_(moved[name])
            else:
                move.zero_()
        self.changes.load_state_dict(state.get("changes", {}))
