"""AD-PSGD: after a step, move to the common mean with one random neighbour."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.flow import Pair
from shoal.runtime.step.modes.mode import Apply, Asks, Parameters


class PairsMode:
    """One event is one round: x_i, x_j <- (x_i + x_j) / 2, then my step, and nobody else waits.

    The peer moves by itself when my model reaches it and answers with the mean; I move by the
    difference between that mean and what I sent. The sum of both models is kept.

    Args:
        parameters: the model, updated in place.
        neighbours: whom I may ask.
        seed: of the choice; a worker's choices are its own.
    """

    gradients = None
    agrees = False

    def __init__(self, parameters: Parameters, neighbours: Sequence[int], seed: str) -> None:
        self.parameters = parameters
        self.neighbours = tuple(neighbours)
        self.seed = seed
        self.events = 0

    def opening(self) -> list[Asks]:
        """Nothing travels before the step is done."""
        return []

    @torch.no_grad()
    def closing(self, apply: Apply) -> Asks:
        """Take my step, then meet one neighbour."""
        with torch.enable_grad():
            apply()
        self.events += 1
        if not self.neighbours:
            return
        peer = random.Random(f"{self.seed}/{self.events}").choice(self.neighbours)
        sent = tuple(p.detach().clone() for p in self.parameters.values())
        means = yield Pair(peer, sent)
        for p, before, mean in zip(self.parameters.values(), sent, means, strict=True):
            p += mean - before

    def due(self) -> bool:
        """Never of all workers at once."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """How many events there were."""
        return {"events": self.events}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where ``state_dict`` left off; of an empty state, begin anew."""
        self.events = int(state.get("events", 0))
