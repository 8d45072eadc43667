"""The protocol of the coordination axis: who carries messages, what is sent, how it is mixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Via = Literal["collective", "server", "peers", "shared", "predictions"]
Sends = Literal["gradient", "delta", "parameter", "prediction"]


@dataclass(frozen=True)
class Outer:
    """Momentum for agreed changes: ``D <- momentum D + rate change``, and D is applied.

    Args:
        momentum: factor of the previous D; None: 1 - 1/n for n workers.
        rate: factor of the new change.
    """

    momentum: float | None
    rate: float

    def momentum_of(self, workers: int) -> float:
        """Return the momentum for this number of workers."""
        return 1 - 1 / workers if self.momentum is None else self.momentum


@dataclass(frozen=True)
class Coordination:
    """With whom a worker agrees.

    Args:
        name: the text that a user types.
        via: who carries messages: a collective of all workers, servers, or peers.
        sends: what is agreed on if every step ends with an exchange.
        mixing: ``(workers, round) -> W``; a worker's new value is its row of ``W`` times all.
        servers: extra processes, which do not run the user's loop.
        on_death: what the others do when a worker dies.
        outer: momentum for agreed changes; None: they are applied as they are.
    """

    name: str
    via: Via
    sends: Sends
    mixing: Callable[[int, int], Tensor] = field(compare=False)
    servers: int = 0
    on_death: Literal["fail", "shrink", "replace"] = "fail"
    outer: Outer | None = None

    def __repr__(self) -> str:
        return self.name


def complete(workers: int, round: int) -> Tensor:
    """Return W of a collective: every worker gets the mean of all."""
    return torch.full((workers, workers), 1 / workers, dtype=torch.float64)


def spectral_gap(w: Tensor) -> float:
    """Return 1 - |second eigenvalue|: the share of the disagreement that one round removes."""
    if w.shape[0] == 1:
        return 1.0
    sizes = torch.linalg.eigvals(w.to(torch.float64)).abs().sort(descending=True).values
    return float(1 - sizes[1])
