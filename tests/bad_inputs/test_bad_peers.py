"""When ranks are given different things all of them say so, alike, and none is left waiting."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bad_input_forms import DATA, Made, TwoHeads, X, Y, cross_entropy, sgd, started, wait_for
from torch import Tensor, nn

import shoal
from shoal.errors import NonFinite, UsageError
from shoal.runtime.world.join import join
from shoal.testing.processes import Outcome, outcomes, run_workers

pytestmark = pytest.mark.gloo


def errors(results: list[Outcome]) -> list[str]:
    """The last line of each worker's traceback; a signal is none."""
    assert all(result.exitcode in (0, 1) for result in results), results
    return [(result.error or "\n").strip().split("\n")[-1] for result in results]


def _differ(kind: str) -> None:
    odd = join().rank == 1
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    options: dict[str, Any] = {"clip": 2.0 if odd and kind == "clip" else 1.0}
    if odd and kind == "shape":
        model[0], model[2] = nn.Linear(4, 5), nn.Linear(5, 2)
    if odd and kind == "count":
        model[2] = nn.Linear(4, 2, bias=False)
    if odd and kind == "dtype":
        model.double()
    if odd and kind == "frozen":
        model[0].bias.requires_grad_(False)
    if odd and kind == "buffer":
        model[1] = nn.BatchNorm1d(4, track_running_stats=False)
    if kind == "strategy":
        options["strategy"] = "tensor=2" if odd else "bsp"
    optimizer = sgd(model, lr=0.2 if odd and kind == "lr" else 0.1)
    if odd and kind == "optimizer":
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    run = shoal.distribute(model, optimizer, loss=cross_entropy, **options)
    run.step((X, Y))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("lr", "lr of model optimizer's group 0: 0.1 on rank 0, 0.2 on rank 1"),
        ("optimizer", "model optimizer: SGD on rank 0, Adam on rank 1"),
        ("shape", "model.0.weight: (4, 4) torch.float32 on rank 0, (5, 4) torch.float32 on rank 1"),
        ("count", "model.2.bias: (2,) torch.float32 on rank 0, nothing on rank 1"),
        ("dtype", "model.0.weight: (4, 4) torch.float32 on rank 0, (4, 4) torch.float64 on rank 1"),
        ("frozen", "model.0.bias: (4,) torch.float32 on rank 0, (4,) torch.float32 frozen on rank"),
        ("buffer", "model.1.running_mean: (4,) torch.float32 on rank 0, nothing on rank 1"),
        ("strategy", "strategy: data, all_reduce, bsp"),
        ("clip", "clip: 1.0 on rank 0, 2.0 on rank 1"),
    ],
)
def test_what_differs_between_ranks_is_told_by_both_with_both_values(
    kind: str, expected: str
) -> None:
    first, second = errors(outcomes(2, _differ, kind))
    assert first == second
    assert f"LayoutMismatch: rank 0 and rank 1 differ in {expected}" in first


def _start_apart() -> tuple[list[float], list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shoal").addHandler(handler)
    logging.getLogger("shoal").setLevel(logging.INFO)
    torch.manual_seed(join().rank)
    before = nn.Linear(4, 2)
    first = before.weight.flatten().tolist()
    run = started(before)
    text = [line for line in lines if "now uses the weights" in line]
    return (first if run.is_main else run.model.weight.flatten().tolist()), text  # type: ignore[operator]


def test_of_different_starts_rank_0s_is_taken_and_told() -> None:
    (first, silent), (second, text) = run_workers(2, _start_apart)
    assert first == second
    assert silent == []
    assert text == ["rank 1 now uses the weights of rank 0, because its own were different"]


def _nan_on_one(policy: str) -> tuple[list[bool], list[float], str]:
    rank, calls = join().rank, iter(range(9))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        bad = rank == 1 and next(calls) == 1
        return cross_entropy(output, target) * (math.inf if bad else 1)

    torch.manual_seed(0)
    run = started(loss=loss, nonfinite=policy)
    skipped = []
    try:
        for _ in range(3):
            skipped.append(run.step((X, Y)).skipped)
    except NonFinite as error:
        return skipped, [], str(error)
    return skipped, run.model.weight.flatten().tolist(), ""  # type: ignore[operator]


def test_a_nan_on_one_rank_stops_all_and_all_name_step_and_rank() -> None:
    for skipped, _, text in run_workers(2, _nan_on_one, "stop"):
        assert skipped == [False]
        assert text.startswith("the loss is NaN or inf at step 1 on rank 1: lower the learning")


def test_a_nan_on_one_rank_is_skipped_by_all_where_asked() -> None:
    (first, one, _), (second, other, _) = run_workers(2, _nan_on_one, "skip")
    assert first == second == [False, True, False]
    assert one == other
    assert all(map(math.isfinite, one))


def _use_what_only_one_uses() -> tuple[list[float], list[float], int]:
    torch.manual_seed(0)
    model = TwoHeads()
    run = started(model)
    if run.rank == 1:
        model.forward = lambda x: model.used(x) + model.idle(x)  # type: ignore[method-assign]
    before = model.idle.weight.detach().clone()
    for _ in range(3):
        run.step((X, Y))
    moved = (model.idle.weight.detach() - before).flatten().tolist()
    return model.used.weight.flatten().tolist(), moved, run.steps


def test_a_parameter_that_only_one_rank_uses_is_trained_by_all() -> None:
    first, second = run_workers(2, _use_what_only_one_uses)
    assert first == second
    assert any(first[1])


def _refused(strategy: str, piece: str) -> str:
    try:
        _try(strategy, piece)
    except UsageError as error:
        dist.barrier()  # nobody leaves while another is still on its way to the same error
        return str(error)
    return "not refused"


def _try(strategy: str, piece: str) -> None:
    run = started(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), strategy=strategy)
    if piece == "loader":
        run.loader(DATA, 1)
    elif piece == "micro":
        list(run.micro((X, Y)))
    elif piece == "uncountable":
        run.step(object())


@pytest.mark.parametrize(
    ("workers", "strategy", "piece", "expected"),
    [
        (2, "auto", "loader", "batch_size=1 is the global batch size"),
        (2, "auto", "uncountable", "cannot tell how many samples"),
        (2, "pipe=2", "micro", "a pipeline interleaves the forwards and backwards"),
        (2, "tensor=2", "", "plan"),
        (3, "tensor=2", "", "3 workers cannot be cut as .* multiply to 2; start a multiple of 2"),
        (3, "data(2)", "", "3 workers"),
    ],
)
def test_what_several_workers_cannot_do_is_refused_by_each(
    workers: int, strategy: str, piece: str, expected: str
) -> None:
    for text in run_workers(workers, _refused, strategy, piece):
        assert re.search(expected, text), text


def _fewer_steps_on_one(ended: Path) -> bool:
    run = started(timeout=4)
    run.step((X, Y))
    if run.is_main:
        try:
            run.step((X, Y))
        finally:
            ended.touch()
    wait_for(ended)
    return True


def test_a_rank_that_makes_fewer_steps_is_missed_by_name(tmp_path: Path) -> None:
    first, second = outcomes(2, _fewer_steps_on_one, tmp_path / "ended")
    assert second.value
    assert "ExchangeTimeout" in errors([first])[0]
    assert "rank 1 is missing" in errors([first])[0]


def _fewer_samples_than_workers() -> tuple[list[int], list[float]]:
    torch.manual_seed(0)
    run = started()
    feed = run.loader(Made(lambda i: DATA[i], 4), 3, shuffle=False)
    seen = [(feed.loader.mine, run.step(batch).samples) for batch in feed]
    return [mine for mine, _ in seen], run.model.weight.flatten().tolist()  # type: ignore[operator]


def test_a_worker_without_samples_takes_part_and_weighs_nothing() -> None:
    (first, one), (second, other) = run_workers(2, _fewer_samples_than_workers)
    assert [a + b for a, b in zip(first, second, strict=True)] == [3, 1]
    assert one == other
