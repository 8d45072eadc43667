"""Cut replicas inside a run: the same numbers as one process, and what crosses between replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.models import gpt
from shoal.testing.processes import outcomes, run_workers

VOCAB, LENGTH, STEPS = 11, 6, 3


def words(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCAB, (samples, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def train(strategy: str, options: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    torch.manual_seed(0)
    model = gpt(VOCAB, LENGTH, layers=2, heads=2, width=16).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = shoal.distribute(model, optimizer, loss=cross_entropy, strategy=strategy, **options)
    data = torch.utils.data.TensorDataset(*words(8))
    losses = []
    with run:
        for batch in run.loader(data, 8, epochs=steps, shuffle=False):
            losses.append(run.step(batch).loss)
        told = run.evaluate(data, 8)
        replica = next(iter(run.replicas.values()))
        from shoal.runtime.resume.state import model_state

        state = model_state(replica.model_part)
    return {"losses": losses, "told": told["loss"], "state": state}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_workers(1, train, "auto", {"accumulate": 2, "clip": 1.0})[0]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, "shard=2"),
        (3, "shard=3"),
        (2, "tensor=2"),
        (2, "pipe=2"),
        (4, "data(2) * shard(2)"),
        (4, "data(2) * tensor(2)"),
        (4, "data(2) * pipe(2)"),
        (4, "tensor(2) * pipe(2)"),
        (4, "shard(2), ring"),
    ],
)
def test_cut_replicas_equal_one_process(ranks: int, strategy: str, alone: dict[str, Any]) -> None:
    # eight samples over three ranks are uneven on purpose
    results = run_workers(ranks, train, strategy, {"accumulate": 2, "clip": 1.0})
    for result in results:
        assert difference(alone["state"], result["state"]) < 1e-9
        assert result["told"] == pytest.approx(alone["told"], abs=1e-9)
        assert result["losses"] == pytest.approx(alone["losses"], abs=1e-9)


@pytest.mark.gloo
@pytest.mark.parametrize("cut", ["shard(2)", "tensor(2)", "pipe(2)"])
@pytest.mark.parametrize("how", ["local(2)", "error_feedback(topk(0.3))", "cast(bfloat16)"])
def test_other_axes_work_between_cut_replicas(cut: str, how: str) -> None:
    results = run_workers(4, train, f"{cut}, {how}", {}, 4)  # ends with an exchange of local(2)
    for result in results:
        assert result["told"] < results[0]["losses"][0]
        assert difference(results[0]["state"], result["state"]) == 0.0


@pytest.mark.gloo
def test_powersgd_crosses_tensor_but_not_shard() -> None:
    results = run_workers(4, train, "tensor(2), error_feedback(powersgd(1))", {})
    assert results[0]["losses"][-1] < results[0]["losses"][0]
    with pytest.raises(shoal.errors.ConflictError, match="whole matrices"):
        shoal.parse("shard(2), powersgd(1)")


def own_loop() -> None:
    torch.manual_seed(0)
    model = gpt(VOCAB, LENGTH, layers=2, heads=2, width=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = shoal.distribute(model, optimizer, loss=cross_entropy, strategy="pipe(2)")
    run.forward(words(4))


@pytest.mark.gloo
def test_a_pipeline_refuses_an_own_loop() -> None:
    for outcome in outcomes(2, own_loop):
        assert "instead: run.step(batch)" in (outcome.error or "")


def uneven(strategy: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = gpt(VOCAB, LENGTH, layers=2, heads=2, width=16).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = shoal.distribute(model, optimizer, loss=cross_entropy, strategy=strategy, accumulate=2)
    data = torch.utils.data.TensorDataset(*words(9))
    from shoal.runtime.resume.state import model_state

    with run:
        for batch in run.loader(data, 8, epochs=2, shuffle=False):  # the last batch has one sample
            run.step(batch)
        told = run.evaluate(data, 4)
        return {"told": told["loss"], "state": model_state(run.replicas["model"].model_part)}


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["shard(3)", "tensor(2)", "pipe(2)", "data(2) * pipe(2)"])
def test_a_rank_without_samples_still_computes(strategy: str) -> None:
    (alone,) = run_workers(1, uneven, "auto")
    ranks = 3 if strategy == "shard(3)" else 4
    for result in run_workers(ranks, uneven, strategy):
        assert difference(alone["state"], result["state"]) < 1e-9
        assert result["told"] == pytest.approx(alone["told"], abs=1e-9)
