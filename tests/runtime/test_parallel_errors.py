"""A model that cannot be cut as asked is refused with the reason and the way out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import UnknownName, UsageError
from shoal.models import gpt, mlp, resnet
from shoal.runtime.parallel import shard, tensor
from shoal.runtime.parallel.parallelize import group_names, repoint
from shoal.runtime.parallel.stages import Blueprint, Stage, stage_of, stages


class Declared(nn.Module):
    """A model with whatever plan and stages a test wants."""

    def __init__(self, plan: dict[str, str] | None = None, cut: list[list[str]] | None = None):
        super().__init__()
        self.wide, self.odd, self.norm = nn.Linear(4, 6), nn.Linear(6, 3), nn.LayerNorm(3)
        self.plan, self.cut = plan or {}, cut or []

    def tensor_plan(self, n: int) -> dict[str, str]:
        return self.plan

    def pipe_stages(self, n: int) -> list[list[str]]:
        return self.cut


class Loose(Declared):
    """Has a parameter of its own, outside all submodules."""

    def __init__(self) -> None:
        super().__init__(cut=[["wide"], ["odd", "norm"]])
        self.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("model", "n", "message"),
    [
        (lambda: resnet(), 2, r"ResNet, because it has no tensor plan; instead: give it a method"),
        (lambda: gpt(8, heads=4, width=8), 3, r"4 heads.*3; instead: use a divisor of 4"),
        (
            lambda: mlp(4, 4, width=5),
            2,
            r"split 1, because its out_features=5 is not divisible by 2; instead",
        ),
        (
            lambda: Declared({"odd": "row", "wide": "column"}),
            4,
            r"split odd, because its in_features=6",
        ),
        (lambda: Declared({"nowhere.*": "row"}), 2, r"'nowhere\.\*' in its plan matches no module"),
        (
            lambda: Declared({"norm": "row"}),
            2,
            r"norm, because .*'row' needs an nn\.Linear.* is a LayerNorm",
        ),
        (lambda: Declared({"wide": "vocab"}), 2, r"wide, because .*'vocab' needs an nn\.Embedding"),
    ],
)
def test_a_tensor_cut_that_cannot_be_says_why(
    model: Callable[[], nn.Module], n: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        tensor.plan(model(), n)


class Foreign(nn.Module):
    """A model as Hugging Face declares it."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(4, 4)}) for _ in range(2))
        self._tp_plan = {"layers.*.q": "colwise"}
        self.config = SimpleNamespace(num_attention_heads=heads)


def test_a_plan_of_hugging_face_is_read_and_its_heads_are_counted() -> None:
    assert tensor.plan(Foreign(4), 2) == {"layers.0.q": "column", "layers.1.q": "column"}
    with pytest.raises(UsageError, match=r"num_attention_heads=3 is not divisible by 2; instead"):
        tensor.plan(Foreign(3), 2)


def test_an_unknown_style_offers_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean column"):
        tensor.plan(Declared({"wide": "colum"}), 2)


@pytest.mark.parametrize(
    ("model", "n", "message"),
    [
        (
            lambda: nn.Linear(2, 2),
            2,
            r"Linear, because it does not define.*instead: give it.*pipe_stages",
        ),
        (lambda: gpt(8, layers=2), 3, r"only 2 blocks; instead: use at most pipe\(2\)"),
        (lambda: mlp(4, 4, layers=2), 3, r"this model has only 2; instead: use at most pipe\(2\)"),
        (
            lambda: Declared(cut=[["wide"]]),
            2,
            r"returned 1 stages, 0 of them empty; instead: return 2",
        ),
        (
            lambda: Declared(cut=[["wide", "odd", "norm"], []]),
            2,
            r"returned 2 stages, 1 of them empty",
        ),
        (lambda: Declared(cut=[["wide"], ["odd"]]), 2, r"norm\.weight is in no stage"),
        (Loose, 2, r"scale is in no stage; instead: list .* must first move"),
        (
            lambda: gpt(8, layers=2, tied=True),
            2,
            r"embed\.tokens\.weight \(stage 0\) and head\.weight \(stage 1\) are one tied.*untie",
        ),
    ],
)
def test_a_pipeline_that_cannot_be_says_why(
    model: Callable[[], nn.Module], n: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        stages(model(), n)


def test_an_optimizer_that_already_stepped_is_refused() -> None:
    model = mlp(2, 2)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    adam.step()
    with pytest.raises(UsageError, match=r"state for 4 parameters.*instead: call distribute first"):
        group_names(adam, model)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = mlp(2, 2), mlp(2, 2)
    sgd = torch.optim.SGD([*model.parameters(), *other.parameters()])
    with pytest.raises(UsageError, match="4 parameters of the optimizer are not in the model"):
        group_names(sgd, model)


def test_an_optimizer_keeps_its_groups_though_a_stage_leaves_one_empty() -> None:
    model = mlp(2, 2)
    first, last = list(model[1].parameters()), list(model[3].parameters())
    groups: list[dict[str, Any]] = [{"params": first}, {"params": last, "lr": 9.0}]
    sgd = torch.optim.SGD(groups, lr=1.0)
    names = group_names(sgd, model)
    stage = Stage(model, stages(model, 2)[1])
    repoint(sgd, names, stage)
    assert [len(group["params"]) for group in sgd.param_groups] == [0, 2]
    assert sgd.param_groups[1]["lr"] == 9.0
    sgd.step()


def test_a_stage_keeps_names_and_drops_the_rest() -> None:
    model = gpt(8, layers=3, width=8)
    names, cut = dict(model.named_parameters()), stages(model, 3)
    parts = [Stage(copy.deepcopy(model), links) for links in cut]  # a stage takes its model apart
    assert [n for stage in parts for n, _ in stage.named_parameters()] == list(names)
    assert {stage_of(n, cut) for n in names} == {0, 1, 2}


def test_a_chain_is_cut_where_the_shares_of_parameters_are_nearest() -> None:
    model = nn.Sequential(
        nn.Linear(1, 1), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU()
    )
    assert stages(model, 2) == [["0", "1", "2", "3"], ["4", "5"]]
    assert stages(model, 3) == [["0", "1"], ["2", "3"], ["4", "5"]]


def test_a_blueprint_tells_shapes_and_holds_no_numbers() -> None:
    model = gpt(8, 4, layers=2, width=8)
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    blueprint = Blueprint(model, stages(model, 2))
    assert {p.device.type for p in blueprint.model.parameters()} == {"meta"}
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    activations = blueprint.activations((torch.zeros(3, 4, dtype=torch.long),))
    assert [tuple(p[0].shape) for p in activations] == [(3, 4), (3, 4, 8), (3, 4, 8)]
    assert [p[0].requires_grad for p in activations] == [False, True, True]


def test_what_is_no_tensor_cannot_pass_between_stages() -> None:
    class Returned(nn.Linear):
        def forward(self, x: torch.Tensor) -> object:  # type: ignore[override]
            return {"x": super().forward(x)}

    model = nn.Sequential(Returned(2, 2), nn.Linear(2, 2))
    with pytest.raises(UsageError, match="the output of a submodule contains a dict"):
        Blueprint(model, stages(model, 2)).activations((torch.zeros(1, 2),))


def test_blocks_that_share_a_parameter_are_gathered_with_the_root() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
    assert list(shard.blocks(model)) == [model[0], model[2], model[3]]
    model[2].weight = model[3].weight
    assert list(shard.blocks(model)) == [model[0]]
