"""Contenders start equal and, but for how they train, do the same."""

from __future__ import annotations

import os

import pytest
import torch

from shoal.bench.contenders import CONTENDERS, WORKLOADS, _task, loss, prepare
from shoal.testing.processes import run_workers


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_task_is_equal_for_every_contender_and_its_loss_is_a_scalar(name: str) -> None:
    one, other = (_task(WORKLOADS[name], 3, rank=0) for _ in range(2))
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)
    for (x, y), (x_too, y_too) in zip(one.batches, other.batches, strict=True):
        assert torch.equal(x, x_too)
        assert torch.equal(y, y_too)
    x, y = one.batches[0]
    assert loss(one.model(x), y).shape == ()


def test_ranks_have_the_same_model_and_other_data() -> None:
    one, other = (_task(WORKLOADS["tiny"], 3, rank) for rank in range(2))
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert not torch.equal(one.batches[0][0], other.batches[0][0])


def test_making_a_task_leaves_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    _task(WORKLOADS["tiny"], 3, rank=0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_bare_loop_learns() -> None:
    task = _task(WORKLOADS["tiny"], 0, rank=0)
    x, y = task.batches[0]
    before = loss(task.model(x), y).item()
    step = CONTENDERS["bare"](task)
    for _ in range(40):
        step()
    assert loss(task.model(x), y).item() < before


def _trained(names: tuple[str, ...]) -> list[list[float]]:
    """In a worker: the parameters each contender ends with, side by side as when timed."""
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if workers > 1:
        torch.distributed.init_process_group("gloo")
    tasks = [_task(WORKLOADS["tiny"], 1, rank) for _ in names]
    steps = [CONTENDERS[name](task) for name, task in zip(names, tasks, strict=True)]
    for step in steps * 5:
        step()
    return [torch.nn.utils.parameters_to_vector(t.model.parameters()).tolist() for t in tasks]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("workers", "names"), [(1, ("bare", "shoal")), (2, ("ddp", "ddp, local buffers", "shoal"))]
)
def test_contenders_do_the_same_work(workers: int, names: tuple[str, ...]) -> None:
    """A time is worth comparing only between those that end with the same parameters."""
    for peer, *others in run_workers(workers, _trained, names):
        for other in others:
            assert other == pytest.approx(peer, rel=1e-4, abs=1e-6)


def _stepped() -> tuple[int, bool]:
    steps, meet, leads = prepare("tiny", ("bare", "bare"), seed=0)
    meet()
    for step in steps:
        step()
    return len(steps), leads


@pytest.mark.gloo
def test_one_worker_leads() -> None:
    assert run_workers(2, _stepped) == [(2, True), (2, False)]
