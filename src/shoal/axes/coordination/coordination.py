"""What a coordination is: who carries, what is sent, and how it is mixed."""

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
    """What is made of an agreed change before it is applied: ``D <- momentum D + rate change``.

    Args:
        momentum: what is carried on of the move before, D; None: 1 - 1/n for n workers.
        rate: how much of the new change is taken.
    """

    momentum: float | None
    rate: float

    def momentum_of(self, workers: int) -> float:
        """The momentum where so many take part."""
        return 1 - 1 / workers if self.momentum is None else self.momentum


@dataclass(frozen=True)
class Coordination:
    """With whom a worker agrees. Equality and repr are by what one types.

    Args:
        name: what one types.
        via: who carries: a collective of all, a server, neighbours.
        sends: what is agreed on when every step ends in an exchange.
        mixing: ``(workers, round) -> W``; a worker's new value is its row of ``W`` times all.
        servers: extra processes, which never run the user's loop.
        on_death: what a worker's death means to the others.
        outer: what is made of a change that was agreed on; None: it is applied as it is.
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
    """Everyone gets the mean of all: the doubly stochastic matrix of one round."""
    return torch.full((workers, workers), 1 / workers, dtype=torch.float64)


def spectral_gap(w: Tensor) -> float:
    """1 - |second eigenvalue|: how much of a disagreement one round removes."""
    if w.shape[0] == 1:
        return 1.0
    sizes = torch.linalg.eigvals(w.to(torch.float64)).abs().sort(descending=True).values
    return float(1 - sizes[1])
