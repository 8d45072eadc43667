"""What distribute is given and cannot take: one error that names the value, why and the way out."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input_forms import DATA, cross_entropy, sgd, started
from torch import nn

import shoal
from shoal.errors import BadArgument, ConflictError, UnknownName, UsageError


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("all_reduc", UnknownName, "unknown technique 'all_reduc': did you mean all_reduce"),
        ("frobnicate(3)", UnknownName, "unknown technique 'frobnicate'"),
        (
            "topk(2)",
            BadArgument,
            r"topk\(2\): ratio must lie in .*for example topk\(0.01\)",
        ),
        ("local(0)", BadArgument, r"local\(0\)"),
        ("local(2.5)", BadArgument, r"local\(2.5\)"),
        ("parameter_server, ssp(-1)", BadArgument, r"ssp\(-1\)"),
        ("parameter_server(servers=0)", BadArgument, r"parameter_server\(.*0"),
        ("powersgd(0)", BadArgument, r"powersgd\(0\)"),
        ("wfbp(0MB)", BadArgument, r"wfbp\(0\)"),
        ("tensor=0", BadArgument, "0"),
        ("tensor=two", BadArgument, "two"),
        ("topk(0.1, 0.2, 0.3)", BadArgument, r"topk\(0.1, 0.2, 0.3\)"),
        ("topk(ratoi=0.1)", BadArgument, "ratoi"),
        ("bsp, ssp(3)", UsageError, r"bsp and ssp\(3\) are two techniques of the axis synchrony"),
        ("bsp; fifo", UsageError, "cannot read 'bsp; fifo'"),
        ("__import__('os')", UsageError, "__import__"),
        ("tensor=2", UsageError, "1 workers cannot be cut .* multiply to 2; start a multiple of 2"),
        ("pipe=2", UsageError, "multiply to 2"),
        (3, UsageError, "strategy=3: the strategy must be text or a Strategy"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused(
    text: Any, kind: type[Exception], expected: str
) -> None:
    with pytest.raises(kind, match=expected):
        started(strategy=text)


def test_all_conflicts_of_a_strategy_are_told_at_once() -> None:
    with pytest.raises(ConflictError, match=r"because.*instead") as caught:
        started(strategy="gossip, ssp(3), topk(0.1), priority, ring")
    assert len(caught.value.conflicts) >= 4


def test_a_bad_strategy_of_the_environment_is_told_where_it_came_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOAL_STRATEGY", "all_reduce, &%")
    with pytest.raises(UsageError, match=r"SHOAL_STRATEGY='all_reduce,.*cannot read"):
        started()
    with pytest.raises(UsageError, match="SHOAL_STRATEGY="):
        started(strategy="bsp")


def test_a_strategy_with_servers_or_peers_trains_on_one_worker_all_the_same() -> None:
    for text in ("parameter_server, asp", "gossip", "local(4)"):
        assert started(strategy=text).step(DATA[:]).samples == len(DATA)


@pytest.mark.parametrize("name", ["clip", "timeout"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "1", True])
def test_a_limit_is_a_positive_finite_number(name: str, value: Any) -> None:
    with pytest.raises(BadArgument, match=f"{name}={value!r}: must be a positive, finite number"):
        started(**{name: value})


@pytest.mark.parametrize("name", ["accumulate", "every", "keep"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_a_count_is_a_whole_number_from_one_up(name: str, value: Any) -> None:
    with pytest.raises(BadArgument, match=f"{name}={value!r}: must be a whole number >= 1"):
        started(**{name: value})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"acumulate": 2}, "unknown option of distribute 'acumulate': did you mean accumulate"),
        ({"nonfinite": "skp"}, "unknown nonfinite policy 'skp': did you mean skip"),
        ({"backend": "mpi"}, "unknown backend 'mpi': choose one of: gloo, nccl"),
        ({"logger": 3}, r"logger=3: must have a method log\(metrics, step\)"),
        ({"loss": "mse"}, r"loss='mse': must be a function \(output, target\)"),
        ({"checkpoint": 3}, "checkpoint=3: must be the path of a directory"),
        ({"checkpoint": ""}, "checkpoint='': must be the path of a directory"),
    ],
)
def test_an_option_that_cannot_be_is_named(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        started(**options)


def test_a_misspelt_option_of_train_finds_the_loaders_names_too() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(UnknownName, match="option of train 'epoch': did you mean epochs"):
        shoal.train(model, sgd(model), DATA, loss=cross_entropy, epoch=2)


def test_a_place_for_checkpoints_is_tried_before_training(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (file, file / "below", loop, tmp_path / ("x" * 4096), tmp_path / "a\nb"):
        with pytest.raises(BadArgument, match=r"checkpoint=.*; choose another directory"):
            started(checkpoint=path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_place_for_checkpoints_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BadArgument, match="cannot be written to"):
        started(checkpoint=tmp_path / "checkpoints")


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0, -1, torch.tensor(math.nan)])
def test_a_learning_rate_is_finite_and_not_negative(rate: Any) -> None:
    model = nn.Linear(4, 2)
    optimizer = sgd(model)
    optimizer.param_groups[0]["lr"] = rate  # torch looks at it only once, and lets nan and inf pass
    with pytest.raises(BadArgument, match=f"lr={float(rate)} in group 0 of model's optimizer"):
        shoal.distribute(model, optimizer)


def test_momentum_is_a_number_too() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=math.nan)
    with pytest.raises(BadArgument, match="momentum=nan"):
        shoal.distribute(model, optimizer)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda x: x, "needs an nn.Module, not function"),
        (nn.Linear, "needs an nn.Module, not the class Linear"),
        (None, "needs an nn.Module, not NoneType"),
        (nn.ReLU(), "ReLU has no parameters: add some"),
        (nn.Linear(4, 2).requires_grad_(False), "Linear has only frozen parameters: unfreeze"),
    ],
)
def test_a_model_is_a_module_with_something_to_train(model: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        shoal.distribute(model, sgd(nn.Linear(4, 2)))


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (None, "the optimizer is missing"),
        ("sgd", "needs a torch.optim.Optimizer, not str"),
        (torch.optim.SGD, "needs a torch.optim.Optimizer, not the class SGD"),
    ],
)
def test_an_optimizer_is_an_optimizer(optimizer: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        shoal.distribute(nn.Linear(4, 2), optimizer)


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match="2 of the 2 parameters of the SGD are not in the Linear"):
        shoal.distribute(nn.Linear(4, 2), sgd(nn.Linear(4, 2)))
    model, temperature = nn.Linear(4, 2), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    with pytest.raises(UsageError, match=r"1 of the 3 .* shape \(3,\).*not average them; build"):
        shoal.distribute(model, optimizer)


def test_several_models_come_in_pairs() -> None:
    model = nn.Linear(4, 2)
    frozen = nn.Linear(4, 2).requires_grad_(False)
    for models, expected in (
        ({}, "a dict of models needs at least one entry"),
        ({"g": model}, "'g' is a Linear, but it must be"),
        ({"g": (model,)}, "'g' is a tuple of 1, but it must be a tuple of two"),
        ({"g": (model, None)}, "the optimizer is missing"),
        ({"g": (model, sgd(model)), "d": (frozen, sgd(model))}, "only frozen parameters"),
    ):
        with pytest.raises(UsageError, match=expected):
            shoal.distribute(models)  # type: ignore[arg-type]
