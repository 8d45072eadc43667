"""The convergence suite: what is train_all, that runs repeat, how made-up figures are judged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch

from benchmarks import convergence, convergence_task
from benchmarks.convergence import (
    CONTENDERS,
    EXACT,
    FEEDBACK,
    RATE,
    TOPK,
    Contender,
    differences,
    draw,
    one_thread,
    order,
    points_below_exact,
    rows,
    student,
    train_all,
)
from benchmarks.convergence_task import ConvergenceTask, Curve, batches, normalized, train
from benchmarks.data import PIXELS, Data
from shoal import bench
from shoal.bench.report import Result
from shoal.bench.suites import BenchSettings
from shoal.strategy import parse

SIGN = Contender("sign", rate=0.003)


@pytest.fixture(scope="module")
def small() -> ConvergenceTask:
    """Pictures whose class is the brightest of four rows, for two workers and few steps."""
    chance = torch.Generator().manual_seed(0)
    y = torch.arange(160) % 4
    x = torch.rand(160, PIXELS, PIXELS, generator=chance)
    x[torch.arange(160), 7 * y] += 1
    flat = x.flatten(1)
    data = Data("rows", (flat[:128], y[:128]), (flat[128:], y[128:]))
    return ConvergenceTask(normalized(data), workers=2, batch=8, steps=6, every=4, width=8)


def ends(exact: float, fed: float, topk: float, noise: float = 0.1) -> dict[str, list[float]]:
    """Three seeds around these means; all but exact stray."""
    stray = (-noise, 0.0, noise)
    return {
        EXACT: [exact] * 3,
        FEEDBACK: [fed + each for each in stray],
        TOPK: [topk + each for each in stray],
    }


def verdicts(found: dict[str, list[float]]) -> dict[str, bool | None]:
    judged = [points_below_exact(Contender(name), found) for name in (FEEDBACK, TOPK)] + list(
        order(found)
    )
    return {row.case: row.passes for row in judged}


def curve(end: float) -> Curve:
    return [(4, end / 2), (6, end)]


def test_the_suite_is_listed_with_every_contender_once() -> None:
    assert bench.find("convergence") is convergence.SUITE
    names = [contender.name for contender in CONTENDERS]
    assert len(set(names)) == len(names)
    assert {EXACT, FEEDBACK, TOPK} <= set(names)


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda c: c.name)
def test_every_contender_is_a_legal_strategy(contender: Contender) -> None:
    parse(f"{contender.name}, fifo")


def test_a_rate_of_its_own_stands_in_the_case() -> None:
    assert Contender(EXACT).case == EXACT
    assert SIGN.case == "sign, rate 0.003"
    assert {c.name for c in CONTENDERS if c.rate != RATE} == {"sign", "dgc(0.01)"}


def test_pictures_get_mean_zero_and_deviation_one_by_what_is_trained_on(
    small: ConvergenceTask,
) -> None:
    x = small.data.train[0]
    assert x.mean().item() == pytest.approx(0, abs=1e-5)
    assert x.std().item() == pytest.approx(1, abs=1e-5)
    assert small.data.held_out[0].mean().item() != 0


def test_a_pass_over_the_data_repeats_nothing_and_the_next_is_in_another_order(
    small: ConvergenceTask,
) -> None:
    longer = ConvergenceTask(small.data, workers=2, batch=32, steps=4)
    first, second, third, fourth = (x for x, _ in batches(longer, seed=1))
    passes = torch.cat([first, second]), torch.cat([third, fourth])
    assert all(len(torch.unique(x, dim=0)) == 128 for x in passes)
    assert not torch.equal(*passes)


def test_every_contender_sees_the_same_batches_and_another_seed_others(
    small: ConvergenceTask,
) -> None:
    one, again, other = (next(islice(batches(small, seed=s), 3, None))[0] for s in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("name", [EXACT, FEEDBACK, "sign", "local(8)", "gossip(ring)"])
def test_a_run_repeats_and_evaluates_every_few_steps_and_at_the_end(
    small: ConvergenceTask, name: str
) -> None:
    once = train(small, f"{name}, fifo", rate=0.1, seed=3)
    torch.manual_seed(99)  # what others draw changes nothing
    assert train(small, f"{name}, fifo", rate=0.1, seed=3) == once
    assert [step for step, _ in once] == [4, 6]
    assert all(0 <= percent <= 100 for _, percent in once)


def test_training_learns_what_can_be_learnt(small: ConvergenceTask) -> None:
    longer = ConvergenceTask(small.data, workers=2, batch=16, steps=60, every=30, width=16)
    assert train(longer, "exact, fifo", rate=0.1, seed=0)[-1][1] > 90


def test_threads_are_as_many_as_before_afterwards() -> None:
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_the_published_order_holds_every_bar() -> None:
    assert set(verdicts(ends(90.5, 89.8, 77)).values()) == {True}


@pytest.mark.parametrize("fed", [88.5, 92.0])
def test_error_feedback_must_come_within_a_point_from_either_side(fed: float) -> None:
    assert verdicts(ends(90.5, fed, 77))[FEEDBACK] is False


def test_without_feedback_it_must_fall_behind_by_more_than_a_point() -> None:
    assert verdicts(ends(90.5, 90.4, 89.6))[TOPK] is False


def test_a_tie_keeps_the_order_and_a_clear_lead_of_the_lossy_one_does_not() -> None:
    case = f"{EXACT} less {FEEDBACK}"
    assert verdicts(ends(90.5, 90.6, 77))[case] is True
    assert verdicts(ends(90.5, 91.0, 77))[case] is False


def test_feedback_that_helps_nothing_breaks_the_order() -> None:
    assert verdicts(ends(90.5, 77, 77, noise=0))[f"{FEEDBACK} less {TOPK}"] is False


def test_one_seed_cannot_tell_a_tie() -> None:
    [first, second] = order({EXACT: [90.0], FEEDBACK: [90.1], TOPK: [80.0]})
    assert (first.threshold, first.passes) == (None, None)
    assert (second.threshold, second.passes) == ("> 0", True)


def test_only_what_the_bars_are_about_is_judged() -> None:
    assert points_below_exact(SIGN, {EXACT: [90.0], "sign": [50.0]}).threshold is None


def test_the_interval_is_students() -> None:
    interval = student([1.0, 2.0, 3.0])
    assert interval is not None
    assert interval.half_width == pytest.approx(4.303 / 3**0.5)
    assert sum(interval) / 2 == pytest.approx(2)
    assert student([1.0]) is None


def test_seeds_are_compared_with_themselves() -> None:
    assert differences([3.0, 5.0], [1.0, 4.0]) == [2.0, 1.0]


def test_every_contender_has_a_mean_and_a_row_a_seed() -> None:
    made = {
        Contender(name): [curve(v) for v in values] for name, values in ends(90, 89.5, 80).items()
    }
    found: Sequence[Result] = list(rows(made, (5, 6, 7), "rows"))
    assert len(found) == len({(row.case, row.metric) for row in found}) == 3 + 2 + 2 + 9
    assert found[0].metric == "held-out accuracy, rows, mean of 3 seeds"
    assert [row.value for row in found if row.metric.endswith("seed 7")] == [90, 89.6, 80.1]


def test_the_plot_shows_every_contender(
    small: ConvergenceTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convergence, "PLOTS", tmp_path / "runs")
    path = draw({Contender(EXACT): [curve(80), curve(90)], SIGN: [curve(70), curve(70)]}, small)
    text = path.read_text(encoding="utf-8")
    assert f">{EXACT}</text>" in text
    assert "sign, rate 0.003: 6, 30<" in text
    assert "exact: 6, 15<" in text  # the mean of its seeds


def test_a_model_without_errors_is_drawn_as_half_of_one(
    small: ConvergenceTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convergence, "PLOTS", tmp_path)
    text = draw({Contender(EXACT): [curve(100)]}, small).read_text(encoding="utf-8")
    assert "exact: 6, 1.562<" in text  # of 32 pictures


def test_the_suite_runs_from_end_to_end(
    small: ConvergenceTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convergence, "PLOTS", tmp_path)
    monkeypatch.setattr(convergence, "default_task", lambda: small)
    told: list[tuple[str, int, int]] = []
    quick = BenchSettings(quick=True, seed=4, progress=lambda *each: told.append(each))
    found = list(convergence.SUITE.run(quick))
    assert told[0] == (f"{EXACT}, seed 4", 0, 3)
    assert {row.case for row in found if row.metric.endswith("seed 4")} == {EXACT, FEEDBACK, TOPK}
    assert (tmp_path / "convergence.svg").exists()


def test_every_seed_trains_every_contender(small: ConvergenceTask) -> None:
    chosen = (Contender(EXACT), SIGN)
    curves = train_all(small, chosen, (0, 1), BenchSettings())
    assert {contender: len(each) for contender, each in curves.items()} == dict.fromkeys(chosen, 2)
    assert curves[SIGN][1] == train(small, "sign, fifo", rate=SIGN.rate, seed=1)


def test_the_task_is_one_pass_over_60000_pictures_by_eight_workers() -> None:
    assert (ConvergenceTask.workers, ConvergenceTask.steps) == (
        8,
        60_000 // (ConvergenceTask.workers * ConvergenceTask.batch),
    )
    assert ConvergenceTask.steps % ConvergenceTask.every == 0
    assert convergence_task.CLASSES == 10
