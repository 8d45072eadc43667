"""Local SGD: each worker takes several steps alone, then the changes are averaged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.flow import Asks
from shoal.runtime.step.modes.mode import Apply, Mode, ModeSetup, State


class LocalMode(Mode):
    """Local SGD: every ``period`` steps, x <- anchor + mean(x - anchor).

    ``anchor`` is the model after the last exchange. The change x - anchor is sent, not x, because
    it can be compressed better. With block momentum (BMUF) the anchor changes by ``rate`` times the
    mean change plus ``momentum`` times its previous change, which ``moves`` holds.
    """

    def __init__(self, setup: ModeSetup) -> None:
        super().__init__(setup)
        self.exchange = setup.exchange()
        self.anchor = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._momentum, self._rate = 0.0, 1.0
        outer, workers = setup.strategy.coordination.outer, setup.index.workers
        if outer is not None and workers > 1:  # a single worker uses no outer momentum
            self._momentum, self._rate = outer.momentum_of(workers), outer.rate
        plain = (self._momentum, self._rate) == (0, 1)  # the anchor changes by the mean change
        moving = {} if plain else self.parameters
        self.moves = {name: torch.zeros_like(p.detach()) for name, p in moving.items()}

    @torch.no_grad()
    def closing(self, apply: Apply) -> Asks:
        """Call ``apply``. After the last step of a period, average the changes."""
        with torch.enable_grad():
            apply()
        due = self.due()
        self.steps += 1
        if not due:
            return
        views = self.exchange.flat.views
        for name, p in self.parameters.items():
            torch.sub(p, self.anchor[name], out=views[name].view)
        yield from self.exchange.flows()
        for name, p in self.parameters.items():
            move = views[name].view
            if self.moves:
                move = self.moves[name].mul_(self._momentum).add_(move, alpha=self._rate)
            self.anchor[name] += move
            p.copy_(self.anchor[name])

    def state_dict(self) -> State:
        """Return the step count, the anchor, its last change, and the compressor's state."""
        state = {"steps": self.steps, "anchor": self.anchor, "changes": self.exchange.state_dict()}
        return {**state, "moves": self.moves} if self.moves else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` returned. With {}, the model becomes the anchor."""
        self.steps = int(state.get("steps", 0))
        for name, value in state.get("anchor", self.parameters).items():
            self.anchor[name].copy_(value.detach())
        moves = state.get("moves", {})
        for name, move in self.moves.items():
            if name in moves:
                move.copy_(moves[name])
            else:
                move.zero_()
        self.exchange.load_state_dict(state.get("changes", {}))
