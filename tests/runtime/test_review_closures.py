"""A closure changes when gradients are agreed on: what does not go with it is refused, not lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import StepLR

import shoal
from shoal.errors import ConflictError
from shoal.rules import Facts
from shoal.runtime.validate import needs_closure
from shoal.testing.processes import run_workers


class Search(torch.optim.Optimizer):
    """A line search of the user's own, which is no LBFGS."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 0.1})  # type: ignore[arg-type]

    def step(self, closure: object) -> None:  # type: ignore[override]
        """Needs a closure."""


def test_whether_an_optimizer_asks_is_read_from_its_step() -> None:
    weight = [nn.Parameter(torch.zeros(2))]
    scheduled = SGD(weight, lr=0.1)
    StepLR(scheduled, 1)  # wraps step
    assert needs_closure(LBFGS(weight))
    assert needs_closure(Search(weight))
    assert not any(map(needs_closure, (SGD(weight, lr=0.1), Adam(weight), scheduled)))


@pytest.mark.parametrize(
    ("facts", "between"),
    [
        (Facts(2, closure=True, clips=True), "closure x clip"),
        (Facts(2, closure=True, skips=True), "closure x nonfinite='skip'"),
    ],
)
def test_what_has_no_effect_inside_a_closure_is_refused(facts: Facts, between: str) -> None:
    with pytest.raises(ConflictError, match=between):
        shoal.parse("wfbp").bind(facts)
    shoal.parse("wfbp").bind(facts._replace(closure=False))


def test_all_conflicts_are_told_at_once() -> None:
    with pytest.raises(ConflictError) as caught:
        shoal.parse("local(2)").bind(Facts(2, closure=True, clips=True, skips=True))
    assert len(caught.value.conflicts) == 3


def with_closure(strategy: str, options: dict[str, object]) -> str:
    model = nn.Linear(3, 1)
    run = shoal.distribute(
        model, SGD(model.parameters(), lr=0.1), strategy=strategy, loss=nn.MSELoss(), **options
    )

    def closure() -> Tensor:
        loss = model(torch.ones(2, 3)).sum()
        run.backward(loss)
        return loss

    try:
        run.update(closure=closure)
    except ConflictError as error:
        return str(error)
    return "updated"


@pytest.mark.gloo
def test_a_closure_that_would_never_be_agreed_on_is_refused_when_it_is_given() -> None:
    for told in run_workers(2, with_closure, "local(2)", {}):
        assert "closure x all_reduce, local(2)" in told


def test_a_closure_is_refused_beside_clip_and_skip_when_it_is_given() -> None:
    assert with_closure("auto", {}) == "updated"
    assert "closure x clip" in with_closure("auto", {"clip": 1.0})
    assert "closure x nonfinite='skip'" in with_closure("auto", {"nonfinite": "skip"})
