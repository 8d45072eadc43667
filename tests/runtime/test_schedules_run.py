"""Every schedule trains like one process, also while it measures and changes its messages."""

from __future__ import annotations

import os
from functools import cache

import pytest
from equality_cases import (
    BATCH,
    Deep,
    Odd,
    Parameters,
    build,
    difference,
    momentum,
    parameters,
    points,
)
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.testing.logs import captured_logs
from shoal.testing.processes import run_workers

pytestmark = pytest.mark.gloo
EPOCHS = 18  # of three batches: enough to measure, to try, to try again, and to keep
MODELS = {"odd": build(Odd, momentum), "deep": build(Deep, momentum)}
MEASURED = [
    "merged",
    "adaptive",
    "adaptive(early=False)",
    "magnitude(64, 1)",
    "tictac",
    "priority(64)",
    "priority(64, credit=128)",
]
FIXED = ["fused(64)", "dear(64)", "dear", "tictac(tic)"]
SERVED = ["parameter_server(2), tictac", "parameter_server(2), tictac(tic)"]
EF = "error_feedback(topk(0.5))"


@cache
def alone(model: str) -> Parameters:
    net, optimizer = MODELS[model]()
    x, y = points()
    for _ in range(EPOCHS):
        for inputs, target in zip(x.split(BATCH), y.split(BATCH), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), target).backward()
            optimizer.step()
    return parameters(net)


def trained(model: str, strategy: str) -> Parameters:
    net, optimizer = MODELS[model]()
    backend = os.environ.get("BACKEND", "gloo")
    run = shoal.distribute(
        net, optimizer, loss=nn.functional.cross_entropy, strategy=strategy, backend=backend
    )
    with run:
        for batch in run.loader(TensorDataset(*points()), BATCH, epochs=EPOCHS, shuffle=False):
            run.step(batch)
    return parameters(net)


def train_all(*strategies: str) -> dict[str, Parameters]:
    return {f"{model}; {s}": trained(model, s) for s in strategies for model in MODELS}


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategies", [MEASURED, FIXED], ids=["measured", "fixed"])
def test_lossless_schedules_equal_one_process(strategies: list[str], workers: int) -> None:
    check(run_workers(workers, train_all, *strategies))


@pytest.mark.parametrize("strategy", SERVED)
def test_pulls_from_servers_in_any_order_equal_one_process(strategy: str) -> None:
    told = run_workers(2, trained, "odd", strategy, servers=2)
    check([{f"odd; {strategy}": found} for found in told])


def test_all_schedules_run_on_shared_memory() -> None:
    """The backend of workers on one host."""
    check(run_workers(2, train_all, "merged", "adaptive", "dear(64)", env={"BACKEND": "shoal"}))


def check(everyone: list[dict[str, Parameters]]) -> None:
    for rank, told in enumerate(everyone):
        for what, found in told.items():
            gap = difference(found, alone(what.partition("; ")[0]))
            assert gap <= 1e-9, f"{what}, rank {rank}"


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_stay_alike_when_messages_are_compressed(workers: int) -> None:
    whole = [s for s in [*MEASURED, *FIXED] if "dear" not in s]
    lossy = [*(f"{s}, {EF}" for s in whole), "dear(64), cast(bfloat16)"]
    first, *others = run_workers(workers, train_all, *lossy)
    for other in others:
        for what, found in first.items():
            assert difference(found, other[what]) == 0, what
            assert all(bool(p.isfinite().all()) for p in found.values()), what


def said(strategy: str) -> list[str]:
    lines = captured_logs()
    trained("deep", strategy)
    return [line for line in lines if line.startswith(strategy)]


def test_the_main_rank_says_what_it_chose_and_why() -> None:
    main, other = run_workers(2, said, "adaptive")
    assert "to measure messages of another size" in main[0]
    assert "the link is measured; a message takes" in main[1]
    assert any("best of" in line for line in main)
    assert not other
