"""The class of all coordination techniques: who exchanges what, and with which weights."""

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
    """Momentum for averaged changes.

    D is the change of the model in one exchange, and 0 at first. In each exchange D becomes
    ``momentum * D + rate * change``, where ``change`` is the mean of the workers' changes. Then D
    is added to the model.

    Args:
        momentum: factor of the previous D. None means 1 - 1/n for n workers.
        rate: factor of the new averaged change.
    """

    momentum: float | None
    rate: float

    def momentum_of(self, workers: int) -> float:
        """Return the momentum for this number of workers."""
        return 1 - 1 / workers if self.momentum is None else self.momentum


@dataclass(frozen=True)
class Coordination:
    """With which workers a worker exchanges messages, and what the messages are.

    Args:
        name: the text that a user types.
        via: with whom messages are exchanged, for example with all workers in a ``collective``.
        sends: what is sent if the period of the synchrony is 1.
        mixing: ``(workers, round) -> W``; ``W[i, j]`` is the weight of worker j's value for i.
        servers: number of extra processes, which do not run the user's loop.
        on_death: what the other workers do when a worker dies; the launcher supports only ``fail``.
        outer: momentum for averaged changes. With None, they are applied as they are.
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
    """Return the mixing matrix of a collective, with which every worker gets the mean over all."""
    return torch.full((workers, workers), 1 / workers, dtype=torch.float64)


def spectral_gap(w: Tensor) -> float:
    """Return 1 - |second largest eigenvalue| of a mixing matrix W.

    If W is symmetric, a round removes at least this share of the disagreement between workers.
    """
    if w.shape[0] == 1:
        return 1.0
    magnitudes = torch.linalg.eigvals(w.to(torch.float64)).abs().sort(descending=True).values
    return float(1 - magnitudes[1])
