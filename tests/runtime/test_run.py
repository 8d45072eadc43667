"""The loop in the user's hands, in processes: pieces, weights, NaN, evaluation, agreement."""

from __future__ import annotations

import copy
import math
import os
import signal
from typing import Any

import pytest
import torch
from equality_cases import Deep, Parameters, difference, parameters, points
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import shoal
from shoal.strategy import parse
from shoal.testing.processes import outcomes, run_workers
from shoal.testing.trainer import LockstepTrainer, digits, tiny

pytestmark = pytest.mark.gloo
TOLERANCE = 1e-9
cross = nn.functional.cross_entropy


def made(strategy: str, **options: Any) -> tuple[Any, nn.Module, SGD]:
    torch.manual_seed(0)
    model = Deep().double()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return (
        shoal.distribute(model, optimizer, loss=cross, strategy=strategy, **options),
        model,
        optimizer,
    )


def plain(sizes: list[int]) -> Parameters:
    """One process over the first samples, cut into batches of these sizes."""
    torch.manual_seed(0)
    model = Deep().double()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = points()
    for a, b in zip(x[: sum(sizes)].split(sizes), y[: sum(sizes)].split(sizes), strict=True):
        optimizer.zero_grad()
        cross(model(a), b).backward()
        optimizer.step()
    return parameters(model)


def pieces(strategy: str, to_none: bool) -> Parameters:
    """run.step spelled out, with the user's own zero_grad."""
    run, model, optimizer = made(strategy)
    with run:
        for batch in run.loader(TensorDataset(*points()), 13, shuffle=False):
            optimizer.zero_grad(set_to_none=to_none)
            for micro in run.micro(batch, parts=2):
                run.backward(run.forward(micro))
            run.update()
            optimizer.zero_grad(set_to_none=to_none)
    return parameters(model)


def without_micro(strategy: str) -> Parameters:
    """Equal parts, weighed alike."""
    run, model, _ = made(strategy)
    x, y = points()
    with run:
        for k in range(3):
            mine = slice(8 * k + 4 * run.rank, 8 * k + 4 * run.rank + 4)
            run.backward(cross(model(x[mine]), y[mine]))
            run.update()
    return parameters(model)


def own_batches(strategy: str) -> Parameters:
    """Parts of sizes that differ by rank and by step: 1 + 4, 2 + 7, 3 + 2."""
    run, model, _ = made(strategy)
    x, y = points()
    with run:
        for start, cut, stop in ((0, 1, 5), (5, 7, 14), (14, 17, 19)):
            mine = slice(start, cut) if run.rank == 0 else slice(cut, stop)
            run.step((x[mine], y[mine]))
    return parameters(model)


def loops(_: int) -> dict[str, Parameters]:
    told = {}
    for s in ("fifo", "wfbp(1)", "priority(64)"):
        told[f"pieces; {s}"] = pieces(s, True)
        told[f"pieces, zeroed; {s}"] = pieces(s, False)
        told[f"without micro; {s}"] = without_micro(s)
        told[f"own batches; {s}"] = own_batches(s)
    return told


def test_loops_of_ones_own_equal_one_process() -> None:
    wanted = {
        "pieces": plain([13, 13, 3]),
        "without micro": plain([8] * 3),
        "own batches": plain([5, 9, 5]),
    }
    for told in run_workers(2, loops, 0):
        for what, got in told.items():
            name = what.partition(";")[0].partition(",")[0]
            assert difference(got, wanted[name]) <= TOLERANCE, what


def poisoned(strategy: str, nonfinite: str) -> tuple[Any, list[bool], bool]:
    """The second of three batches holds a NaN in the last rank's part."""
    run, model, _ = made(strategy, nonfinite=nonfinite)
    x, y = points()
    x[11] = math.nan
    with run:
        feed = run.loader(TensorDataset(x[:18], y[:18]), 6, shuffle=False)
        skipped = [run.step(batch).skipped for batch in feed]
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    return parameters(model), skipped, finite


def test_a_nan_on_one_worker_is_skipped_by_all() -> None:
    for strategy in ("wfbp(1)", "error_feedback(topk(0.5))"):
        told = run_workers(2, poisoned, strategy, "skip")
        for got, skipped, finite in told:
            assert skipped == [False, True, False]
            assert finite
            assert difference(got, told[0][0]) == 0


@pytest.mark.parametrize("strategy", ["wfbp", "priority(64)"])
def test_a_nan_stops_all_workers_by_name(strategy: str) -> None:
    for outcome in outcomes(2, poisoned, strategy, "stop", seconds=60):
        assert outcome.error is not None
        assert "NonFinite" in outcome.error
        assert "step 1 on rank 1" in outcome.error


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x))
        return out


def normed(_: int) -> tuple[Tensor, Tensor, Tensor]:
    """My running mean, the one while evaluating, and mine again."""
    torch.manual_seed(0)
    model = Normed().double()
    run = shoal.distribute(model, SGD(model.parameters(), lr=0.1), loss=cross)
    with run:
        for batch in run.loader(TensorDataset(*points()), 14, shuffle=False, drop_last=True):
            run.step(batch)
        mine = model.norm.running_mean.clone()
        with run.replicas["model"].agreed():
            shared = model.norm.running_mean.clone()
    return mine, shared, model.norm.running_mean.clone()


def test_running_statistics_are_local_and_their_mean_is_evaluated() -> None:
    told = run_workers(2, normed, 0)
    mean = (told[0][0] + told[1][0]) / 2
    assert not torch.equal(told[0][0], told[1][0])
    for mine, shared, after in told:
        torch.testing.assert_close(shared, mean, rtol=0, atol=1e-12)
        assert torch.equal(mine, after)


def numbers(_: int) -> dict[str, Any]:
    torch.manual_seed(100 + torch.initial_seed() % 7)
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = nn.Linear(6, 3).double()
    run = shoal.distribute(model, SGD(model.parameters(), lr=0.1), loss=cross)
    start = parameters(model)
    x, y = points()
    told = run.evaluate(TensorDataset(x[:5], y[:5]), 4, metrics={"accuracy": shoal.accuracy})
    whole = cross(model(x[:5]), y[:5]).item()
    right = float((model(x[:5]).argmax(-1) == y[:5]).double().mean())
    agreed = [run.agree(rank + 1.0, how) for how in ("mean", "sum", "max", "min")]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run.step((x[:2].float().double(), y[:2]))
    run.close()
    return {"start": start, "told": told, "whole": whole, "right": right, "agreed": agreed}


def test_rank_0_starts_all_and_evaluation_counts_each_sample_once() -> None:
    told = run_workers(3, numbers, 0)
    for one in told:
        assert difference(one["start"], told[0]["start"]) == 0
        assert one["told"]["loss"] == pytest.approx(one["whole"], abs=TOLERANCE)
        assert one["told"]["accuracy"] == pytest.approx(one["right"], abs=TOLERANCE)
        assert one["agreed"] == [2, 6, 3, 1]


def others(strategies: tuple[str, ...]) -> dict[str, Parameters]:
    told = {}
    for s in strategies:
        model, optimizer = tiny()
        run = shoal.distribute(model, optimizer, loss=cross, strategy=s)
        with run:
            for _ in range(6):
                x, y = (t.tensor_split(run.size)[run.rank] for t in digits(12)[0])
                run.step((x, y))
        told[s] = parameters(model)
    return told


LOCKSTEP = (
    "local(3)",
    "local(2), error_feedback(topk(0.25))",
    "gossip(ring)",
    "error_feedback(topk(0.25))",
    "error_feedback(powersgd(2))",
    "cast(float16)",
    "parameter_server, error_feedback(topk(0.25))",
)


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_processes_do_what_lockstep_does(workers: int) -> None:
    collective, served = LOCKSTEP[:-1], LOCKSTEP[-1:]
    told = run_workers(workers, others, collective)
    more = run_workers(workers, others, served, servers=1)
    for rank in range(workers):
        for text, got in {**told[rank], **more[rank]}.items():
            school = LockstepTrainer(parse(text), workers=workers, build=tiny)
            school.train(digits(12), steps=6)
            limit = 5e-3 if "cast" in text else 1e-12  # gloo sums halves in another order
            assert difference(got, school.parameters(rank)) <= limit, text


def late(strategy: str) -> tuple[list[Parameters], Parameters]:
    """Parameters join in the middle of a period, and one leaves."""
    torch.manual_seed(0)
    model = Deep().double()
    model.last.requires_grad_(False)
    optimizer = SGD(model.first.parameters(), lr=0.1)
    run = shoal.distribute(model, optimizer, loss=cross, strategy=strategy)
    x, y = points()
    with run:
        for k in range(6):
            if k == 1:
                model.last.requires_grad_(True)
                optimizer.add_param_group({"params": list(model.last.parameters())})
            if k == 3:
                model.first[0].bias.requires_grad_(False)
            mine = slice(4 * run.rank, 4 * run.rank + 4)
            run.step((x[mine], y[mine]))
    return [], copy.deepcopy(parameters(model))


def test_replicas_stay_together_when_parameters_join_between_exchanges() -> None:
    told = run_workers(2, late, "local(2)")
    assert difference(told[0][1], told[1][1]) <= 1e-12


class Chosen(nn.Module):
    """Uses one of its two halves, by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor) -> Tensor:
        which = torch.distributed.get_rank()
        out: Tensor = self.halves[which](x)
        return out


def asked_in_between(strategy: str) -> tuple[list[float], Parameters]:
    """A question between backward and update, where gradients are under way on some ranks."""
    torch.manual_seed(0)
    model = Chosen().double()
    optimizer = SGD(model.parameters(), lr=0.1)
    run = shoal.distribute(model, optimizer, loss=cross, strategy=strategy)
    x, y = points()
    told = []
    with run:
        for _ in range(3):
            for micro in run.micro((x[:4], y[:4])):
                run.backward(run.forward(micro))
            told.append(run.agree(run.rank, "sum"))
            run.update()
    return told, parameters(model)


@pytest.mark.parametrize("strategy", ["wfbp(1)", "wfbp(1), ring", "priority(64)"])
def test_a_question_may_come_in_the_middle_of_a_step(strategy: str) -> None:
    (one, first), (other, second) = run_workers(2, asked_in_between, strategy, seconds=60)
    assert one == other == [1, 1, 1]
    assert difference(first, second) == 0


def killed(strategy: str) -> None:
    run, _, _ = made(strategy)
    x, y = points()
    for step in range(50):
        if run.rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        run.step((x[:4], y[:4]))


@pytest.mark.parametrize("strategy", ["wfbp", pytest.param("local(2)", marks=pytest.mark.slow)])
def test_a_worker_that_dies_in_a_step_is_named(strategy: str) -> None:
    told = outcomes(3, killed, strategy, seconds=60)
    assert told[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert told[rank].error is not None
        assert "PeerLost" in told[rank].error
        assert "rank 1" in told[rank].error
