"""A small model, its data, and a run of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import shoal
from shoal.runtime.run import Run

X = torch.linspace(-1, 1, 32).reshape(8, 4)
Y = torch.arange(8) % 2
DATA = TensorDataset(X, Y)
cross_entropy = nn.functional.cross_entropy


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def started(model: nn.Module | None = None, **options: Any) -> Run:
    """A run of a linear model, or of the one given."""
    model = nn.Linear(4, 2) if model is None else model
    return shoal.distribute(model, sgd(model), **{"loss": cross_entropy, **options})


def wait_for(*files: Path) -> None:
    """Wait until all files exist, so that order does not depend on how busy the machine is."""
    end = time.monotonic() + 60
    while not all(file.exists() for file in files) and time.monotonic() < end:
        time.sleep(0.02)


class Made(Dataset[Any]):
    """Samples made by a function of their index."""

    def __init__(self, make: Callable[[int], Any], length: int = 8) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class TwoHeads(nn.Module):
    """One of its heads is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.used(x)
        return made
