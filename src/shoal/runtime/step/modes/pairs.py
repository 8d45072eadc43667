"""AD-PSGD: after a step, average the model with one random neighbour's."""

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
    """One event is one round: x_i, x_j <- (x_i + x_j) / 2 after step i, and no one else waits.

    The peer changes its own model when this worker's arrives, and answers with the mean; this
    worker moves by the difference between that mean and what it sent. So the sum of both models is
    preserved, even if a third worker changes one of them meanwhile.
    """

    def __init__(self, setup: ModeSetup) -> None:
        super().__init__(setup)
        self._carrier = setup.carrier  # a `PairWire`, unless there is one worker only
        worker, workers = setup.index
        row = setup.strategy.coordination.mixing(workers, 0)[worker]
        self.neighbours = tuple(j for j, weight in enumerate(row) if weight and j != worker)
        self.seed = f"pairs/{worker}"  # each worker makes its own choices
        self.events = 0

    @torch.no_grad()
    def closing(self, apply: Apply) -> Asks:
        """Take this worker's step, then average with one neighbour."""
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
        """End the step; peers cannot change the parameters during the update."""
        with self.lock():
            return super().finish(apply)

    def lock(self) -> AbstractContextManager[object]:
        """Hold the wire's lock, so that peers cannot change the parameters."""
        carrier = self._carrier
        return carrier.lock if isinstance(carrier, PairWire) else nullcontext()

    def state_dict(self) -> State:
        """Return the number of events."""
        return {"events": self.events}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; an empty state starts anew."""
        self.events = int(state.get("events", 0))
