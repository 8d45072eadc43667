"""Slices overtake each other at the hops of a tree, and training is as if by one process."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal.axes.scheduling import Event, Layer, mlnet, priority
from shoal.errors import BadArgument, ConflictError
from shoal.explain import explain
from shoal.simulate.schedule import schedule_seconds
from shoal.strategy import Strategy, parse
from shoal.testing.contracts.matrix import legal_products, samples_by_axis
from shoal.testing.processes import run_workers

LAYERS = [Layer(f"l{i}", 48, 1.0, 1.0) for i in range(3)]
BATCH, EPOCHS = 13, 2
LOSSLESS = ["mlnet(128)", "mlnet, tree", "mlnet(128), ring", "mlnet(128), fastest"]


def test_messages_enter_as_backward_makes_them_ready_the_most_urgent_last() -> None:
    """So in a queue the last that was asked for is the one that forward needs first."""
    plan = mlnet(32).plan(LAYERS, lambda n: 1.0)
    assert [task.slices[0].layer for task in plan] == [2, 2, 1, 1, 0, 0]
    assert [task.nbytes for task in plan] == [32, 16] * 3
    assert all(a.priority >= b.priority for a, b in pairwise(plan))
    assert {task.ready for task in plan} == {Event("backward", i) for i in range(3)}
    assert {task.due for task in plan} == {Event("forward", i) for i in range(3)}


def test_its_price_is_that_of_a_step_in_which_none_overtakes() -> None:
    def cost(nbytes: int) -> float:
        return nbytes / 16

    queued, planned = (
        schedule_seconds(s.plan(LAYERS, cost), LAYERS, cost) for s in (mlnet(16), priority(16))
    )
    assert queued.seconds == 1 + 9 + 3  # the link starts when a layer is done, then never rests
    assert planned.seconds <= queued.seconds
    assert next(s.name for s in queued.spans if s.lane == "exchange") == "reduce l2"


def test_a_slice_has_a_size() -> None:
    with pytest.raises(BadArgument, match="mlnet"):
        mlnet(0)


def test_alone_it_is_a_strategy_and_says_that_its_sums_go_by_a_tree() -> None:
    told = explain(parse("mlnet"), 4)
    assert any("overtake others at every hop" in line for line in told.step)
    assert any("by a tree" in line for line in told.sends)
    assert any("by the route ring" in line for line in explain(parse("mlnet, ring"), 4).sends)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mlnet, parameter_server", "all-reduce has no effect"),
        ("mlnet, topk(0.1)", "gathered"),
        ("mlnet, powersgd(2)", "whole matrices"),
        ("mlnet, local(4)", "no backward to overlap"),
    ],
)
def test_where_there_are_no_hops_or_no_sums_it_says_so(text: str, why: str) -> None:
    with pytest.raises(ConflictError, match=why) as raised:
        parse(text)
    assert all(conflict.instead for conflict in raised.value.conflicts)


def test_it_goes_with_every_route_and_every_form_that_is_summed_in_slices() -> None:
    plain = parse("auto")
    given = {**samples_by_axis(), "partition": [plain.partition], "scheduling": [mlnet()]}
    found = [Strategy(*row) for row in legal_products(given)]
    assert all(s.scheduling.queues for s in found)
    assert {s.collectives for s in found} == set(given["collectives"])
    forms = {s.compression.name for s in found}
    assert {"exact", "cast(bfloat16)", "error_feedback(random_k(0.25))"} <= forms
    assert {s.coordination.name for s in found} == {"all_reduce"}


def points() -> tuple[Tensor, Tensor]:
    """(29, 6) numbers and (29,) classes: the last batch is smaller than four workers."""
    chance = torch.Generator().manual_seed(1)
    return torch.randn(29, 6, generator=chance, dtype=torch.float64), torch.arange(29) % 3


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))
    return model.double(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@cache
def alone() -> Tensor:
    model, optimizer = built()
    x, y = points()
    for _ in range(EPOCHS):
        for inputs, target in zip(x.split(BATCH), y.split(BATCH), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return flat(model)


def trained(strategy: str, backend: str) -> tuple[Tensor, list[str]]:
    """What came out, and what was drawn on the timeline."""
    model, optimizer = built()
    run = shoal.distribute(
        model,
        optimizer,
        loss=nn.functional.cross_entropy,
        strategy=strategy,
        backend=backend,
        timeline=True,
    )
    with run:
        for batch in run.loader(TensorDataset(*points()), BATCH, epochs=EPOCHS, shuffle=False):
            run.step(batch)
    drawn = run.context.recorder.timeline().spans
    return flat(model), [span.name for span in drawn if span.lane == "exchange"]


def train_all(backend: str, *strategies: str) -> list[tuple[Tensor, list[str]]]:
    return [trained(strategy, backend) for strategy in strategies]


@pytest.mark.gloo
@pytest.mark.parametrize("workers", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_workers_train_like_one_process(workers: int) -> None:
    for told in run_workers(workers, train_all, "gloo", *LOSSLESS):
        for strategy, (found, names) in zip(LOSSLESS, told, strict=True):
            torch.testing.assert_close(found, alone(), rtol=0, atol=1e-9)
            steps, messages = 3 * EPOCHS, 6 if strategy == "mlnet, tree" else 14
            assert names.count("Mean") == steps * messages, strategy


@pytest.mark.gloo
def test_workers_on_shared_memory_do_too() -> None:
    for told in run_workers(3, train_all, "shoal", *LOSSLESS[:2]):
        for found, _ in told:
            torch.testing.assert_close(found, alone(), rtol=0, atol=1e-9)


@pytest.mark.gloo
def test_workers_stay_alike_when_messages_are_compressed() -> None:
    lossy = ["mlnet(128), cast(bfloat16)", "mlnet(128), error_feedback(random_k(0.5))"]
    first, *others = run_workers(3, train_all, "gloo", *lossy)
    for other in others:
        for (mine, _), (theirs, _) in zip(first, other, strict=True):
            assert torch.equal(mine, theirs)
            assert bool(mine.isfinite().all())


def two_models(strategy: str) -> Tensor:
    """The messages of one are under way when those of the other leave."""
    (g, of_g), (d, of_d) = built(), built()
    run = shoal.distribute({"g": (g, of_g), "d": (d, of_d)}, strategy=strategy)
    with run:
        for batch in run.loader(TensorDataset(*points()), BATCH, epochs=1, shuffle=False):
            for inputs, target in run.micro(batch):
                for model in (g, d):
                    run.backward(nn.functional.cross_entropy(model(inputs), target))
            run.update("g")
            run.update("d")
    return torch.cat([flat(g), flat(d)])


@pytest.mark.gloo
def test_messages_of_several_models_do_not_mix() -> None:
    for queued, plain in run_workers(3, both, "mlnet(64)", "fifo"):
        torch.testing.assert_close(queued, plain, rtol=0, atol=1e-9)


def both(*strategies: str) -> list[Tensor]:
    return [two_models(strategy) for strategy in strategies]
