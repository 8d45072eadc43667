"""Losses that are none, steps out of order, numbers that are not: each named where it happens."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input_forms import DATA, TwoHeads, X, Y, cross_entropy, sgd, started
from torch import Tensor, nn

import shoal
from shoal.errors import (
    CheckpointError,
    CheckpointMismatch,
    CheckpointMissing,
    NonFinite,
    UnknownName,
    UsageError,
)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda o, t: cross_entropy(o, t, reduction="none"), r"shape \(8,\), not one number.*mean"),
        (lambda o, t: 0.5, "the loss is a float, not a tensor"),
        (lambda o, t: None, "the loss is a NoneType, not a tensor"),
        (lambda o, t: cross_entropy(o, t).item(), "the loss is a float"),
        (lambda o, t: cross_entropy(o, t).detach(), r"not connected.*without \.detach"),
        (lambda o, t: (o.argmax(-1) == t).float().mean(), "not connected to any parameter"),
        (lambda o, t: torch.tensor(3), "not connected to any parameter"),
        (lambda o, t: cross_entropy(o, t) * 1j, "complex"),
        (None, r"no loss: the model returned Tensor.*pass loss="),
    ],
)
def test_a_loss_is_one_real_number_with_a_gradient(loss: Any, expected: str) -> None:
    run = started(loss=loss)
    with pytest.raises(UsageError, match=expected):
        run.step((X, Y) if loss else (X,))


def test_a_loss_of_ones_own_loop_is_looked_at_too() -> None:
    run = started()
    for loss, expected in (
        (1.0, "a float"),
        (run.model(X), r"\(8, 2\)"),
        (X.mean(), "not connected"),
    ):
        with pytest.raises(UsageError, match=expected):
            run.backward(loss)  # type: ignore[arg-type]


def nan_from_the_second_step() -> Any:
    calls = iter(range(100))
    return lambda o, t: cross_entropy(o, t) * (math.nan if next(calls) == 1 else 1)


def test_a_nan_stops_the_run_and_names_step_and_rank() -> None:
    run = started(loss=nan_from_the_second_step())
    run.step((X, Y))
    before = run.model.weight.clone()  # type: ignore[operator]
    with pytest.raises(NonFinite, match="the loss is NaN or inf at step 1 on rank 0: lower the"):
        run.step((X, Y))
    assert torch.equal(run.model.weight, before)  # type: ignore[arg-type]


def test_a_nan_is_skipped_and_named_where_asked(caplog: pytest.LogCaptureFixture) -> None:
    run = started(loss=nan_from_the_second_step(), nonfinite="skip")
    steps, weights = [], []
    for _ in range(3):
        steps.append(run.step((X, Y)))
        weights.append(run.model.weight.detach().clone())  # type: ignore[operator]
    assert [step.skipped for step in steps] == [False, True, False]
    assert [math.isnan(step.loss) for step in steps] == [False, True, False]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert "step 1 is skipped: the loss is NaN or inf on rank 0" in caplog.text


class Square(torch.autograd.Function):
    """A finite number whose gradient is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * math.inf


def test_a_gradient_that_is_infinite_is_found_where_its_norm_is_needed() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        made: Tensor = Square.apply(output).mean()  # type: ignore[no-untyped-call]
        return made

    with pytest.raises(NonFinite, match="the gradient is NaN or inf at step 0"):
        started(loss=loss, clip=1.0).step((X, Y))
    assert started(loss=loss, nonfinite="skip").step((X, Y)).skipped


def test_an_update_needs_a_backward() -> None:
    run = started()
    with pytest.raises(UsageError, match=r"run\.backward was not called since the last update"):
        run.update()
    run.step((X, Y))
    cross_entropy(run.model(X), Y).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(UsageError, match=r"not loss\.backward\(\), which would weigh samples"):
        run.update()


def test_one_backward_serves_several_models_once() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 2)
    run = shoal.distribute({"first": (first, sgd(first)), "second": (second, sgd(second))})
    run.backward(cross_entropy(second(first(X)), Y))
    run.update("first")
    run.update("second")
    with pytest.raises(UsageError, match="since the last update"):
        run.update("first")
    with pytest.raises(UsageError, match="needs one model"):
        run.update()
    with pytest.raises(UnknownName, match="unknown model 'secnd': did you mean second"):
        run.update("secnd")


def test_a_graph_is_used_once() -> None:
    run = started()
    loss = run.forward((X, Y))
    run.backward(loss)
    with pytest.raises(UsageError, match=r"twice on one graph.*call run\.forward again"):
        run.backward(loss)


def test_a_closed_run_trains_no_more_but_can_be_looked_at(tmp_path: Path) -> None:
    with started() as run:
        run.step((X, Y))
    with pytest.raises(UsageError, match="this run is closed"):
        run.step((X, Y))
    with pytest.raises(UsageError, match="this run is closed"):
        run.update()
    run.close()
    assert run.evaluate(DATA)["loss"] > 0
    run.save(tmp_path)


@pytest.mark.parametrize(
    ("batch", "kind"), [(object(), "object"), (None, "NoneType"), ({}, "dict"), ("text", "str")]
)
def test_a_batch_that_cannot_be_counted_says_how_to_count_it(batch: Any, kind: str) -> None:
    with pytest.raises(UsageError, match=f"samples are in a batch of type {kind}.*num_samples"):
        started().step(batch)


def test_more_micro_batches_than_samples_are_as_many_as_there_are_samples() -> None:
    assert started(accumulate=100).step((X, Y)).samples == 8


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"dataset": []}, "dataset is empty"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 1.5}, "batch_size=1.5"),
        (
            {"metrics": {"loss": shoal.accuracy}},
            "'loss' is built in: give your metric another name",
        ),
        (
            {"metrics": {"hits": lambda o, t: o.argmax(-1) == t}},
            r"'hits' returned a tensor of shape \(8,\).*mean",
        ),
        ({"metrics": "accuracy"}, "metrics='accuracy': must be functions by name"),
        ({"metrics": {"accuracy": "accuracy"}}, "functions by name"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused(arguments: dict[str, Any], expected: str) -> None:
    run = started()
    with pytest.raises(UsageError, match=expected):
        run.evaluate(**{"dataset": DATA, **arguments})
    assert run.evaluate(DATA)["loss"] > 0


def test_a_way_to_agree_is_one_of_four() -> None:
    with pytest.raises(UnknownName, match="unknown way to agree 'mena': did you mean mean"):
        started().agree(1.0, how="mena")  # type: ignore[arg-type]


def test_a_checkpoint_is_restored_from_where_there_is_one(tmp_path: Path) -> None:
    run = started()
    with pytest.raises(CheckpointMissing, match="does not exist"):
        run.restore(tmp_path / "nowhere")
    with pytest.raises(CheckpointMissing, match=str(tmp_path)):
        run.restore(tmp_path)
    with pytest.raises(UsageError, match="there is no checkpoint directory"):
        run.save()
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CheckpointError, match="is a file; pass a directory"):
        run.save(file)


def test_a_checkpoint_of_another_model_is_refused_with_the_first_difference(
    tmp_path: Path,
) -> None:
    started().save(tmp_path)
    for model, expected in (
        (nn.Linear(4, 3), r"weight.*\(2, 4\).*\(3, 4\)|weight.*\(3, 4\).*\(2, 4\)"),
        (nn.Linear(4, 2).double(), "float64"),
        (nn.Linear(4, 2, bias=False), "bias"),
        (nn.Sequential(nn.Linear(4, 2)), "0.weight"),
    ):
        with pytest.raises(CheckpointMismatch, match=expected):
            started(model).restore(tmp_path)


def test_unused_parameters_are_no_error_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = TwoHeads()
    before = model.idle.weight.detach().clone()
    run = started(model)
    with caplog.at_level(logging.WARNING, "shoal"):
        for _ in range(3):
            run.step((X, Y))
    assert torch.equal(model.idle.weight, before)
    text = [record.getMessage() for record in caplog.records]
    assert len(text) == 1
    assert text[0].startswith("no gradient reached idle.weight, idle.bias: they keep their values")
