"""Resuming with other workers, under another strategy, or another cut: what stays the same."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from resume_cases import BATCH, EPOCHS, Case, Trained, build, data, held, interrupted, uninterrupted
from torch import Tensor, nn

import shoal
from shoal.testing.processes import run_workers

pytestmark = pytest.mark.gloo


class Seen(NamedTuple):
    """One worker's state between two steps."""

    step: int
    parameters: dict[str, Tensor]
    agreed: dict[str, Tensor]
    axes: dict[str, Any]
    moments: dict[str, Tensor]
    said: list[str]


def saved(case: Case, directory: str) -> Seen:
    """Train three steps and save."""
    model, optimizer = build(case)
    run = shoal.distribute(
        model, optimizer, loss=nn.functional.cross_entropy, strategy=case.strategy
    )
    with run:
        for batch in run.loader(data(), BATCH, epochs=EPOCHS, seed=3):
            run.step(batch)
            if run.steps == 3:
                break
        run.save(directory)
        return seen(run, optimizer, [])


def restored(case: Case, directory: str) -> Seen:
    """Restore, look, and take one step to see that it goes on."""
    model, optimizer = build(case)
    said: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shoal").addHandler(heard)
    logging.getLogger("shoal").setLevel(logging.INFO)
    run = shoal.distribute(
        model, optimizer, loss=nn.functional.cross_entropy, strategy=case.strategy
    )
    with run:
        run.restore(directory)
        found = seen(run, optimizer, said)
        for batch in run.loader(data(), BATCH, epochs=EPOCHS, seed=3):
            run.step(batch)
            break
        return found


def seen(run: Any, optimizer: torch.optim.Optimizer, said: list[str]) -> Seen:
    from shoal.runtime.resume.state import copied, model_state

    replica = run.replicas["model"]
    with replica.agreed():
        agreed = copied(model_state(replica.model_part))
    moments = {}
    for name, p in replica.model.named_parameters():
        kept = optimizer.state.get(p, {})
        moment = kept.get("exp_avg", kept.get("momentum_buffer"))
        if moment is not None:
            whole = moment.full_tensor() if hasattr(moment, "full_tensor") else moment
            moments[name] = whole.clone()
    parameters = {n: t.detach().clone() for n, t in held(run).items()}
    return Seen(run.steps, parameters, agreed, replica.mode.state_dict(), moments, said)


def order(workers: list[Trained]) -> dict[int, list[int]]:
    """Samples of each step, all workers' together."""
    return {step: [i for w in workers for i in w.ids[step]] for step in workers[0].ids}


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_samples_keep_their_order_on_another_number_of_workers(
    before: int, after: int, tmp_path: Path
) -> None:
    case = Case("auto", "sgd")
    whole = order(uninterrupted(before, case, tmp_path))
    resumed = order(interrupted(before, case, tmp_path, after=5, again=after))
    assert resumed == {step: ids for step, ids in whole.items() if step >= 3}


def means(seen: list[Seen]) -> dict[str, Tensor]:
    """Mean residual over workers, by parameter."""
    states = [worker.axes["states"] for worker in seen]
    return {key: torch.stack([s[key][0] for s in states]).mean(0) for key in states[0]}


@pytest.mark.parametrize("after", [1, 3])
def test_the_mean_of_residuals_stays(after: int, tmp_path: Path) -> None:
    case = Case("fifo, error_feedback(topk(0.2))", "momentum")
    old = run_workers(2, saved, case, str(tmp_path))
    new = run_workers(after, restored, case, str(tmp_path))
    assert {seen.step for seen in new} == {3}
    for name, mean in means(old).items():
        assert mean.abs().max() > 0
        torch.testing.assert_close(means(new)[name], mean, rtol=1e-12, atol=1e-15)
    for name, value in old[0].parameters.items():
        assert all(torch.equal(value, worker.parameters[name]) for worker in new)


@pytest.mark.slow
def test_the_mean_of_residuals_of_each_shard_stays(tmp_path: Path) -> None:
    case = Case("shard(2), error_feedback(topk(0.2)), fifo")
    old = run_workers(4, saved, case, str(tmp_path))
    new = run_workers(6, restored, case, str(tmp_path))
    for shard in range(2):
        kept, mean = means(new[shard::2]), means(old[shard::2])
        for name in mean:
            torch.testing.assert_close(kept[name], mean[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("strategy", ["local(4)", "gossip(ring)"])
def test_replicas_that_differ_start_from_the_agreed_model(strategy: str, tmp_path: Path) -> None:
    old = run_workers(2, saved, Case(strategy), str(tmp_path))
    new = run_workers(3, restored, Case(strategy), str(tmp_path))
    for name, value in old[0].agreed.items():
        assert not torch.equal(value, old[0].parameters[name]), "replicas differed"
        assert all(torch.equal(value, worker.parameters[name]) for worker in new)
    for name, moment in new[0].moments.items():
        mean = (old[0].moments[name] + old[1].moments[name]) / 2
        torch.testing.assert_close(moment, mean, rtol=1e-12, atol=0)


SWITCHES = [
    ("auto", "local(4)"),
    ("local(4)", "auto"),
    ("gossip(ring)", "fifo, error_feedback(topk(0.2))"),
    ("fifo, error_feedback(topk(0.2))", "priority(64), error_feedback(topk(0.2))"),
    ("fifo, error_feedback(topk(0.2))", "wfbp, error_feedback(powersgd(2))"),
    ("shard(2)", "pipe(2)"),
    ("pipe(2)", "tensor(2)"),
    ("pipe(2)", "local(3)"),
]


@pytest.mark.parametrize(("before", "after"), SWITCHES)
def test_another_strategy_takes_over_the_model_and_says_so(
    before: str, after: str, tmp_path: Path
) -> None:
    old = run_workers(2, saved, Case(before), str(tmp_path))
    new = run_workers(2, restored, Case(after), str(tmp_path))
    for name, value in old[0].agreed.items():
        assert all(torch.equal(value, worker.agreed[name]) for worker in new), name
    assert any("saved with the strategy" in line for line in new[0].said)
    told = any("is dropped" in line for line in new[0].said)
    assert told == ("error_feedback" in before or "local" in before)
    moments = {name: m for worker in old for name, m in worker.moments.items()}
    for worker in new:
        assert worker.moments
        for name, moment in worker.moments.items():
            if "local" not in before and "gossip" not in before:
                assert torch.equal(moment, moments[name]), name


def test_a_served_optimizer_goes_on_without_servers(tmp_path: Path) -> None:
    served = Case("parameter_server, ssp(1), fifo")
    run_workers(2, saved, served, str(tmp_path), servers=1)
    new = run_workers(2, restored, Case("auto"), str(tmp_path))
    assert len(new[0].moments) == 6
    for name, moment in new[0].moments.items():
        assert moment.abs().max() > 0
        assert torch.equal(moment, new[1].moments[name])
    back = run_workers(2, restored, served, str(tmp_path), servers=1)
    for name, value in new[0].agreed.items():
        assert torch.equal(value, back[0].agreed[name])
