"""After the last step under servers: every worker holds what the servers held."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import shoal
from shoal.testing.processes import run_workers

pytestmark = pytest.mark.gloo
STRATEGIES = ["parameter_server, asp", "parameter_server(2), ssp(2)"]


def build() -> tuple[nn.Module, SGD]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    return model, SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch(number: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(number)
    return (
        torch.randn(4, 3, generator=chance, dtype=torch.float64),
        torch.randn(4, 1, generator=chance, dtype=torch.float64),
    )


def closed(strategy: str, directory: str, steps: tuple[int, ...]) -> dict[str, Any]:
    model, optimizer = build()
    run = shoal.distribute(model, optimizer, loss=nn.MSELoss(), strategy=strategy)
    with run:
        for number in range(steps[run.rank]):
            run.step(batch(10 * run.rank + number))
            time.sleep(0.01 * run.rank)
    end = {n: p.detach().clone() for n, p in model.named_parameters()}
    if len(set(steps)) == 1:
        run.save(directory)
    told = run.evaluate(TensorDataset(*batch(99)), 4)["loss"]
    own = float(nn.functional.mse_loss(model(batch(99)[0]), batch(99)[1]))
    kept = {n: optimizer.state[p]["momentum_buffer"] for n, p in model.named_parameters()}
    return {"end": end, "told": told, "own": own, "kept": kept}


def restored(directory: str) -> dict[str, Tensor]:
    model, optimizer = build()
    run = shoal.distribute(model, optimizer, loss=nn.MSELoss())
    assert run.restore(directory)
    named = dict(model.named_parameters())
    return {
        **{n: p.detach().clone() for n, p in named.items()},
        **{f"{n} momentum": optimizer.state[p]["momentum_buffer"] for n, p in named.items()},
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("steps", [(5, 5, 5), (9, 1, 5)])
def test_after_close_all_workers_hold_the_servers_model_and_optimizer(
    strategy: str, steps: tuple[int, ...], tmp_path: Path
) -> None:
    servers = shoal.parse(strategy).coordination.servers
    first, *others = run_workers(3, closed, strategy, str(tmp_path), steps, servers=servers)
    for other in others:
        for name in first["end"]:
            assert torch.equal(first["end"][name], other["end"][name])
            assert torch.equal(first["kept"][name], other["kept"][name])
        assert first["told"] == other["told"] == pytest.approx(first["own"], rel=1e-12)
    saved = restored(str(tmp_path)) if len(set(steps)) == 1 else {}
    for name, value in first["end"].items() if saved else ():
        assert torch.equal(saved[name], value)
        assert torch.equal(saved[f"{name} momentum"], first["kept"][name])


def local_momentum(directory: str, resumes: bool) -> list[Tensor]:
    model, optimizer = build()
    run = shoal.distribute(
        model, optimizer, loss=nn.MSELoss(), strategy="parameter_server, local(2)"
    )
    if resumes:
        run.restore(directory)
    with run:
        for number in range(0 if resumes else 4):
            run.step(batch(number))
        run.save(directory)
    return [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]


def test_where_servers_only_sum_each_worker_saves_its_own_momentum(tmp_path: Path) -> None:
    before = run_workers(2, local_momentum, str(tmp_path), False, servers=1)
    after = run_workers(2, local_momentum, str(tmp_path), True, servers=1)
    for old, new in zip(before, after, strict=True):
        assert all(map(torch.equal, old, new))
