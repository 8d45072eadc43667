"""Models that other frameworks trip over train as they are, on several workers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from bad_input_forms import X, Y, cross_entropy, sgd, started
from torch import Tensor, nn

import shoal
from shoal.errors import NonFinite
from shoal.testing.processes import run_workers

pytestmark = pytest.mark.gloo

Numbers = dict[str, list[float]]


class Mixed(nn.Module):
    """Parameters of five types, one of them complex, and a table looked up by row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 4, sparse=True)
        self.a16 = nn.Parameter(torch.ones(4, dtype=torch.float16))
        self.b16 = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.d64 = nn.Parameter(torch.ones(4, 2, dtype=torch.float64))
        self.c64 = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        looked_up = self.table(torch.arange(len(x)) + (x[:, 0] > 0) * 100)  # (n, 4)
        scores: Tensor = (x * looked_up * self.a16 * self.b16).double() @ self.d64
        return scores * torch.view_as_real(self.c64).sum(-1)


def numbers(model: nn.Module) -> Numbers:
    """Every parameter, complex ones as pairs."""
    return {
        name: (torch.view_as_real(p) if p.is_complex() else p).detach().double().flatten().tolist()
        for name, p in model.named_parameters()
    }


def _train_mixed() -> tuple[Numbers, Numbers]:
    torch.manual_seed(0)
    model = Mixed()
    before = numbers(model)
    run = started(model)
    for _ in range(3):
        run.step((X + run.rank, Y))
    return before, numbers(model)


def test_parameters_of_many_types_are_trained_alike_on_every_rank() -> None:
    (before, first), (_, second) = run_workers(2, _train_mixed)
    assert first == second
    assert all(first[name] != before[name] for name in before)


def _freeze_later() -> tuple[Numbers, Numbers]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    run = started(model)
    run.step((X + run.rank, Y))
    model[0].requires_grad_(False)
    between = numbers(model)
    for _ in range(2):
        run.step((X + run.rank, Y))
    return between, numbers(model)


def test_parameters_may_be_frozen_after_the_first_step() -> None:
    (between, first), (_, second) = run_workers(2, _freeze_later)
    assert first == second
    assert first["0.weight"] == between["0.weight"]
    assert first["1.weight"] != between["1.weight"]


def _overflow(policy: str) -> tuple[list[bool], bool, str]:
    torch.manual_seed(0)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        huge = 1e30 if run.steps == 1 else 1.0
        return cross_entropy(output, target) * huge

    run = started(loss=loss, strategy="cast(float16)", nonfinite=policy)
    skipped = []
    try:
        for _ in range(4):
            skipped.append(run.step((X, Y)).skipped)
    except NonFinite as error:
        return skipped, False, str(error)
    flat = [value for values in numbers(run.model).values() for value in values]
    return skipped, all(map(math.isfinite, flat)), ""


def test_a_gradient_too_large_for_its_message_is_skipped_by_all_where_asked() -> None:
    for skipped, finite, _ in run_workers(2, _overflow, "skip"):
        assert skipped == [False, True, False, False]
        assert finite


def test_a_gradient_too_large_for_its_message_stops_the_run() -> None:
    for skipped, _, text in run_workers(2, _overflow, "stop"):
        assert len(skipped) <= 2
        assert "NaN or inf at step" in text


def _differ_in_size() -> Numbers:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    run = started(model)
    x, y = X.double(), Y
    mine = slice(0, 1) if run.is_main else slice(1, 8)
    for _ in range(3):
        run.step((x[mine], y[mine]))
    return numbers(model)


def test_batches_of_different_sizes_weigh_by_their_samples() -> None:
    first, second = run_workers(2, _differ_in_size)
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(model(X.double()), Y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert first == second
    for name, values in numbers(model).items():
        assert first[name] == pytest.approx(values, abs=1e-9)


def _evaluate_without_training(kinds: Any) -> float:
    model = nn.Linear(4, 2)
    run = shoal.distribute(model, sgd(model), loss=cross_entropy)
    model.requires_grad_(False)
    return run.evaluate([(X[i], Y[i]) for i in range(kinds)])["loss"]


def test_a_frozen_model_may_be_evaluated_on_fewer_samples_than_workers() -> None:
    first, second = run_workers(2, _evaluate_without_training, 1)
    assert first == second
    assert math.isfinite(first)
