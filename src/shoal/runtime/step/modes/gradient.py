"""Agree on the gradient, every step: all workers keep one model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.runtime.step.exchange import Exchange
from shoal.runtime.step.modes.mode import Apply, Asks


class GradientMode:
    """The gradient is agreed on task by task; the update follows.

    Args:
        gradients: the gradients' agreement, which the engine drives while backward computes.
    """

    agrees = True

    def __init__(self, gradients: Exchange) -> None:
        self.gradients = gradients

    def opening(self) -> list[Asks]:
        """Nothing travels before a gradient exists."""
        return []

    def closing(self, apply: Apply) -> Asks:
        """Update with the agreed gradient."""
        apply()
        self.gradients.end_round()
        yield from ()

    def due(self) -> bool:
        """Always."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """The compressor's memory."""
        return self.gradients.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where ``state_dict`` left off."""
        self.gradients.load_state_dict(state)
