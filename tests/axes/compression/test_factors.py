"""Sufficient factors: a linear layer's gradient, sent as what it is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.axes.compression import Trait, Value, sufficient_factors
from shoal.errors import ConflictError
from shoal.flow import Gather, Mean, alone, nbytes
from shoal.runtime.step.hooks import Factors
from shoal.strategy import parse
from shoal.testing.lockstep import lockstep
from shoal.testing.processes import run_workers


def watched(build: Any = None) -> tuple[nn.Module, Factors]:
    torch.manual_seed(0)
    model = build or nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 5))
    return model, Factors(model, dict(model.named_parameters()))


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_made_of(model: nn.Module, factors: Factors, name: str) -> None:
    u, v = factors[name]
    torch.testing.assert_close(u.T @ v, grads(model)[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(7, 40), (40,), (2, 3, 40)])
def test_a_gradient_is_the_product_of_its_factors(shape: tuple[int, ...]) -> None:
    model, factors = watched()
    model(torch.randn(shape)).square().sum().backward()
    assert set(factors) == {"0.weight", "2.weight"}
    for name in factors:
        assert_made_of(model, factors, name)
    assert len(factors["0.weight"][0]) == torch.Size(shape).numel() // 40


@pytest.mark.parametrize(("shape", "kept"), [((7, 40), True), ((2, 3, 40), False)])
def test_an_output_overwritten_in_place_has_factors_unless_it_is_a_view(
    shape: tuple[int, ...], kept: bool
) -> None:
    layers = nn.Sequential(nn.Linear(40, 60), nn.ReLU(inplace=True), nn.Linear(60, 5))
    model, factors = watched(layers)
    model(torch.randn(shape)).square().sum().backward()
    assert ("0.weight" in factors) == kept
    for name in factors:
        assert_made_of(model, factors, name)


def test_backwards_add_up_until_the_update() -> None:
    model, factors = watched()
    for _ in range(3):
        model(torch.randn(2, 40)).square().sum().backward()
    assert len(factors["0.weight"][0]) == 6
    assert_made_of(model, factors, "0.weight")
    factors.clear()
    assert not factors


def test_a_layer_that_runs_twice_has_the_factors_of_both() -> None:
    layer = nn.Linear(40, 40)
    model, factors = watched(nn.Sequential(layer, nn.Tanh(), layer))
    model(torch.randn(3, 40)).square().sum().backward()
    assert len(factors["0.weight"][0]) == 6
    assert_made_of(model, factors, "0.weight")


def test_evaluation_keeps_nothing_and_closing_takes_the_hooks_off() -> None:
    model, factors = watched()
    with torch.no_grad():
        model(torch.randn(3, 40))
    factors.close()
    model(torch.randn(3, 40)).sum().backward()
    assert len(factors) == 0
    assert "9.weight" not in factors


def thin(workers: int, counts: list[int]) -> list[Value]:
    chance = torch.Generator().manual_seed(0)
    values = []
    for count in counts[:workers]:
        u, v = (torch.randn(count, n, generator=chance, dtype=torch.float64) for n in (50, 70))
        values.append(Value(u.T @ v, "w", (u, v)))
    return values


def agreed(values: list[Value]) -> tuple[list[Tensor], list[list[Any]]]:
    asks: list[list[Any]] = [[] for _ in values]

    def seen(value: Value, mine: list[Any]) -> Any:
        flow, told = sufficient_factors().flow(value, None, 0), None
        while True:
            try:
                ask = flow.send(told)
            except StopIteration as end:
                return end.value
            mine.append(ask)
            told = yield ask

    ends = lockstep([seen(v, a) for v, a in zip(values, asks, strict=True)])
    return [end.mean for end in ends], asks


@pytest.mark.parametrize("counts", [[4, 4, 4], [1, 9, 0], [3, 3, 25]])
def test_the_mean_is_exact_and_messages_are_thin(counts: list[int]) -> None:
    values = thin(3, counts)
    means, asks = agreed(values)
    for mean in means:
        torch.testing.assert_close(mean, torch.stack([v.tensor for v in values]).mean(0))
        assert torch.equal(mean, means[0])
    assert [[type(a) for a in mine] for mine in asks] == [[Mean, Gather]] * 3
    assert {nbytes(mine[1]) for mine in asks} == {max(counts) * (50 + 70) * 8}


@pytest.mark.parametrize("counts", [[4, 40], [30, 2]])
def test_if_one_has_too_many_all_send_the_matrix(counts: list[int]) -> None:
    values = thin(2, counts)
    means, asks = agreed([v._replace(tensor=v.tensor.clone()) for v in values])
    assert [[type(a) for a in mine] for mine in asks] == [[Mean, Mean]] * 2
    torch.testing.assert_close(means[0], (values[0].tensor + values[1].tensor) / 2)


def test_a_gradient_that_is_more_than_its_factors_travels_as_it_is() -> None:
    values = thin(2, [4, 4])
    values[1] = values[1]._replace(tensor=values[1].tensor + 0.01)  # a penalty on the weight
    means, asks = agreed([v._replace(tensor=v.tensor.clone()) for v in values])
    assert [type(a) for a in asks[0]] == [Mean, Mean]
    torch.testing.assert_close(means[0], (values[0].tensor + values[1].tensor) / 2)


@pytest.mark.parametrize("bad", [None, "shape", "nan"])
def test_factors_that_are_missing_or_wrong_are_not_used(bad: str | None) -> None:
    (value,) = thin(1, [4])
    u, v = value.factors or (torch.empty(0), torch.empty(0))
    given = {None: None, "shape": (v, u), "nan": (u * float("nan"), v)}[bad]
    _, asks = agreed([value._replace(factors=given)])
    assert [type(a) for a in asks[0]] == [Mean, Mean]


def test_small_matrices_and_vectors_ask_once() -> None:
    for shape in ((7,), (8, 9), (0, 3), (4, 3, 2, 2)):
        flow = sufficient_factors().flow(Value(torch.zeros(shape)), None, 0)
        ask = next(flow)
        with pytest.raises(StopIteration):
            flow.send(alone(ask))


@pytest.mark.parametrize("text", ["local(4)", "gossip", "shard(2)", "parameter_server, asp"])
def test_where_no_gradient_of_a_whole_layer_travels_it_is_refused(text: str) -> None:
    with pytest.raises(ConflictError, match="has factors"):
        parse(f"{text}, sufficient_factors")
    assert Trait.FACTORS in parse("by_size(1KB, exact, sufficient_factors)").compression.traits


def train(strategy: str) -> tuple[Tensor, dict[str, int]]:
    """Parameters after a few steps, and how many bytes each kind of exchange took."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 120), nn.ReLU(), nn.Linear(120, 90), nn.Linear(90, 4))
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    chance = torch.Generator().manual_seed(2)
    x, y = torch.randn(7, 80, generator=chance).double(), torch.arange(7) % 4
    loss: Any = nn.functional.cross_entropy
    sent: dict[str, int] = {}
    run = shoal.distribute(model, optimizer, loss=loss, strategy=strategy)
    (replica,) = run.replicas.values()
    inner = replica.wire.ask

    def ask(given: Any) -> Any:
        for one in getattr(given, "asks", (given,)):
            kind = type(one).__name__
            sent[kind] = sent.get(kind, 0) + nbytes(one)
        return inner(given)

    replica.wire.ask = ask
    for _ in range(3):
        run.step((x[run.rank :], y[run.rank :]))  # 7 samples, and 6
    run.close()
    return nn.utils.parameters_to_vector(model.parameters()).detach(), sent


@pytest.mark.gloo
def test_processes_end_where_exact_ones_do_with_less_traffic() -> None:
    plain = run_workers(2, train, "all_reduce, fifo")
    for schedule in ("fifo", "wfbp"):
        ours = run_workers(2, train, f"all_reduce, {schedule}, sufficient_factors")
        for (mine, sent), (theirs, dense) in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)
            assert sent["Gather"] == 3 * 7 * (80 + 120 + 120 + 90) * 8
            assert sum(sent.values()) < 0.4 * sum(dense.values())
