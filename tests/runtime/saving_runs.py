"""Runs of one worker that are saved and resumed."""

from __future__ import annotations

from typing import Any

import torch
from resume_cases import BATCH, Case, build, data
from torch import Tensor, nn

import shoal
from shoal.runtime.run import Run


def start(model: Any = None, **options: Any) -> Run:
    """A run of one worker."""
    made, optimizer = build(Case("auto")) if model is None else model
    return shoal.distribute(made, optimizer, loss=nn.functional.cross_entropy, **options)


def train(run: Run, steps: int, **options: Any) -> None:
    """So many steps, in the order of the loader."""
    feed = run.loaders[0] if run.loaders else run.loader(data(), BATCH, epochs=9, **options)
    for batch in feed:
        run.step(batch)
        if run.steps == steps:
            break


def values(run: Run) -> dict[str, Tensor]:
    """A copy of the model."""
    return {n: t.detach().clone() for n, t in run.model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())
