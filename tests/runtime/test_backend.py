"""The shoal backend carries runs, and gives the numbers that gloo gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import shoal
from shoal.testing.processes import run_workers
from shoal.testing.trainer import digits, tiny


def train(strategy: str) -> dict[str, Tensor]:
    model, optimizer = tiny()
    loss = torch.nn.functional.cross_entropy
    data = TensorDataset(*digits(13)[0])
    with shoal.distribute(model, optimizer, loss=loss, strategy=strategy) as run:
        for batch in run.loader(data, 8, epochs=3):
            run.step(batch)
        run.evaluate(data)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.gloo
@pytest.mark.parametrize(
    "strategy", ["wfbp", "priority(64)", "error_feedback(powersgd(2))", "local(3)", "gossip(ring)"]
)
def test_runs_on_shoal_equal_runs_on_gloo(strategy: str) -> None:
    gloo = run_workers(2, train, strategy, env={"SHOAL_BACKEND": "gloo"})
    ours = run_workers(2, train, strategy, env={"SHOAL_BACKEND": "shoal"})
    for one, other in zip(gloo, ours, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=0, atol=1e-9)
