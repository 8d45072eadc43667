"""AD-PSGD: after each step, average the model with the model of one random neighbour."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from shoal.flow import Asks, Pair
from shoal.runtime.remote.pairs import PairWire
from shoal.runtime.step.modes.mode import Apply, Mode, ModeSetup, State


class PairsMode(Mode):
    """After a step of worker i, x_i, x_j <- (x_i + x_j) / 2 with one neighbour j.

    Worker i sends its model. The peer j changes its own model to the mean and answers the mean.
    Worker i then adds the difference between the mean and the model that it sent. So the sum of
    both models is preserved, even if a third worker changes one of the two at the same time. The
    other workers do not wait. ``events`` counts steps.
    """

    def __init__(self, setup: ModeSetup) -> None:
        super().__init__(setup)
        self._carrier = setup.carrier  # a `PairWire` if there are several workers
        worker, workers = setup.index
        row = setup.strategy.coordination.mixing(workers, 0)[worker]
        self.neighbours = tuple(j for j, weight in enumerate(row) if weight and j != worker)
        self.seed = f"pairs/{worker}"  # each worker chooses its own sequence of neighbours
        self.events = 0

    @torch.no_grad()
    def closing(self, apply: Apply) -> Asks:
        """Call ``apply``, then average the model with one neighbour."""
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

    def finish(self, apply: Apply) -> float:
        """End the step. Peers can change the parameters only while this waits for an answer."""
        with self.lock():
            return super().finish(apply)

    def lock(self) -> AbstractContextManager[object]:
        """Return the wire's lock. While it is held, peers cannot change the parameters."""
        carrier = self._carrier
        return carrier.lock if isinstance(carrier, PairWire) else nullcontext()

    def state_dict(self) -> State:
        """Return the number of events."""
        return {"events": self.events}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` returned. An empty dict resets the number of events."""
        self.events = int(state.get("events", 0))
