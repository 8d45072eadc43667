"""Servers in processes: every push once, bounded staleness, who leaves, who dies."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from equality_cases import difference, parameters
from torch import Tensor, nn
from torch.optim import SGD

import shoal
from shoal.testing.processes import outcomes, run_workers
from shoal.testing.trainer import digits, tiny

pytestmark = pytest.mark.gloo


class Slope(nn.Module):
    """Its gradient is one, whatever the data and the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.idle = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.sum() * x.mean()


def accounted(strategy: str, steps: tuple[int, ...], closes: bool) -> tuple[Tensor, Tensor]:
    """Each worker takes its own number of steps; the last one waits until all are done."""
    model = Slope()
    run = shoal.distribute(model, SGD(model.parameters(), lr=1.0), strategy=strategy)
    for _ in range(steps[run.rank]):
        run.step((torch.ones(1, dtype=torch.float64),))
    with run.replicas["model"].agreed():
        told = model.w.detach().clone(), model.idle.detach().clone()
    if closes:
        run.close()
    return told


@pytest.mark.parametrize(
    "strategy",
    ["parameter_server, asp", "parameter_server(2), ssp(9)", "parameter_server(4), asp"],
)
def test_every_push_is_applied_exactly_once(strategy: str) -> None:
    servers = shoal.parse(strategy).coordination.servers
    steps = (7, 3, 5)
    for w, idle in run_workers(3, accounted, strategy, steps, True, servers=servers):
        torch.testing.assert_close(w, torch.full((3,), -5.0).double(), rtol=0, atol=1e-12)
        assert idle.tolist() == [1, 1]


def hurried(strategy: str) -> list[float]:
    """Rank 1 is slow; the moments at which each step of mine ended."""
    model = Slope()
    run = shoal.distribute(model, SGD(model.parameters(), lr=1.0), strategy=strategy)
    moments = []
    for _ in range(5):
        if run.rank == 1:
            time.sleep(0.15)
        run.step((torch.ones(1, dtype=torch.float64),))
        moments.append(time.monotonic())
    return moments  # and ends without closing


def test_nobody_runs_ahead_of_the_slowest_by_more_than_the_bound() -> None:
    fast, slow = run_workers(2, hurried, "parameter_server, ssp(1)", servers=1)
    for step in range(2, 5):  # may end step k (from 0) only when the slow one ended step k - 2
        assert fast[step] >= slow[step - 2] - 0.05


def test_with_asp_an_early_finisher_blocks_nobody() -> None:
    fast, slow = run_workers(2, hurried, "parameter_server, asp", servers=1)
    assert len(fast) == len(slow) == 5
    assert fast[-1] < slow[-1]


def killed(strategy: str, directory: str) -> None:
    here = Path(directory)
    model, optimizer = tiny()
    try:
        run = shoal.distribute(
            model, optimizer, loss=nn.functional.cross_entropy, strategy=strategy
        )
    except SystemExit:
        (here / "server left").touch()
        raise
    x, y = digits(12)[0]
    for step in range(50):
        if run.rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        run.step((x, y))
        time.sleep(0.02)


@pytest.mark.parametrize(
    "strategy",
    [
        "parameter_server",
        pytest.param("parameter_server, asp", marks=pytest.mark.slow),
        "parameter_server, ssp(1)",
    ],
)
def test_a_worker_that_dies_is_named_and_the_server_ends(strategy: str, tmp_path: Path) -> None:
    told = outcomes(3, killed, strategy, str(tmp_path), servers=1, seconds=60)
    assert told[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert told[rank].error is not None
        assert "PeerLost" in told[rank].error
        assert "rank 1" in told[rank].error
    assert (tmp_path / "server left").exists()


def big(strategy: str) -> float:
    """Messages far larger than what sockets hold, several under way at once."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(900, 900, bias=False) for _ in range(4)))
    optimizer = SGD(model.parameters(), lr=1e-3)
    run = shoal.distribute(model, optimizer, loss=nn.functional.mse_loss, strategy=strategy)
    with run:
        for _ in range(2):
            run.step((torch.ones(2, 900), torch.zeros(2, 900)))
    return float(sum(p.sum() for p in model.parameters()))


def test_large_messages_do_not_lock_each_other_out() -> None:
    one, other = run_workers(2, big, "parameter_server, wfbp(1)", servers=1, seconds=60)
    assert one == other


def twice(strategy: str) -> str:
    model, optimizer = tiny()
    loss = nn.functional.cross_entropy
    with shoal.distribute(model, optimizer, loss=loss, strategy=strategy) as run:
        run.step(digits(4)[0])
    try:
        shoal.distribute(model, optimizer, loss=loss, strategy=strategy)
    except shoal.errors.UsageError as error:
        return str(error)
    return ""


def test_a_second_run_with_servers_says_that_there_is_none() -> None:
    for told in run_workers(2, twice, "parameter_server", servers=1):
        assert "servers serve only one" in told


def test_a_skipped_step_pushes_nothing() -> None:
    for got in run_workers(2, skipping, "parameter_server, asp", servers=1):
        assert difference(got, parameters(Slope())) == 0


def skipping(strategy: str) -> dict[str, Tensor]:
    model = Slope()
    run = shoal.distribute(
        model, SGD(model.parameters(), lr=1.0), strategy=strategy, nonfinite="skip"
    )
    with run:
        run.step((torch.full((1,), float("nan"), dtype=torch.float64),))
    return parameters(model)
