"""What a run saves, and when; in one process."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_cases import BATCH, Case, build, data
from saving_runs import same, start, train, values
from torch import Tensor, nn

from shoal.errors import (
    BadArgument,
    CheckpointError,
    UsageError,
)
from shoal.runtime.run import Run


def test_save_tells_where_it_saved(tmp_path: Path) -> None:
    run = start()
    train(run, 2)
    assert run.save(tmp_path) == tmp_path / "step-00000002"
    assert (tmp_path / "step-00000002" / "manifest.json").is_file()


STRATEGIES = (
    "local(3)",
    "gossip(ring)",
    "gossip(ring), asp, fifo",
    "parameter_server, asp, fifo",
    "fifo, error_feedback(topk(0.1))",
    "priority(64)",
)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_worker_saves_under_any_strategy(strategy: str, tmp_path: Path) -> None:
    ends = []
    for resumes in (False, True):
        run = start(strategy=strategy)
        if resumes:
            assert run.restore(tmp_path)
        else:
            train(run, 2)
            run.save(tmp_path)
        train(run, 4)
        ends.append(values(run))
    assert same(*ends)


def test_saving_needs_a_place() -> None:
    with pytest.raises(UsageError, match=r"checkpoint="):
        start().save()


def test_restoring_goes_back_to_the_step(tmp_path: Path) -> None:
    run = start()
    train(run, 2)
    before, place = values(run), run.save(tmp_path)
    train(run, 5)
    assert run.restore(place)
    assert run.steps == 2
    assert same(values(run), before)
    after = torch.rand(3)
    run.restore(place)
    assert torch.equal(torch.rand(3), after)


def test_the_last_n_checkpoints_stay(tmp_path: Path) -> None:
    with start(checkpoint=tmp_path, every=2, keep=2) as run:
        train(run, 7)
    found = sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("step"))
    assert found == ["step-00000006", "step-00000007"], "every 2 steps, and the end"


def test_an_automatic_save_waits_until_the_loop_is_done_with_the_batch(tmp_path: Path) -> None:
    run = start(checkpoint=tmp_path, every=1)
    feed = run.loader(data(), BATCH)
    for batch in feed:
        run.step(batch)
        assert not (tmp_path / f"step-{run.steps:08d}").exists()
        assert (tmp_path / f"step-{run.steps - 1:08d}").exists() == (run.steps > 1)
    assert (tmp_path / f"step-{run.steps:08d}").exists()


def test_without_a_loader_it_saves_at_the_update(tmp_path: Path) -> None:
    run = start(checkpoint=tmp_path, every=2)
    for _ in range(2):
        run.step(data()[:4])
    assert (tmp_path / "step-00000002").exists()


def test_several_loaders_each_go_on(tmp_path: Path) -> None:
    def loaders(run: Run) -> Any:
        one = run.loader(data(), 4, epochs=3, seed=1)
        other = run.loader(data(), 6, epochs=3, seed=2)
        return one, other, zip(one, other, strict=False)

    run = start()
    one, other, pairs = loaders(run)
    seen = []
    for a, b in pairs:
        run.step(a)
        run.step(b)
        seen.append((tuple(one.loader.ids), tuple(other.loader.ids)))
        if run.steps == 4:
            run.save(tmp_path)
        if run.steps == 8:
            break
    again = start()
    again.restore(tmp_path)
    one, other, pairs = loaders(again)
    for expected, _ in zip(seen[2:], pairs, strict=False):
        assert (tuple(one.loader.ids), tuple(other.loader.ids)) == expected


def test_data_made_after_distribute_stay_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(checkpoint=tmp_path)
    made = torch.rand(5)
    train(first, 2)
    first.close()
    monkeypatch.setenv("SHOAL_RESUME", "1")
    resumed = start(checkpoint=tmp_path)
    assert resumed.steps == 2
    assert torch.equal(torch.rand(5), made)


def test_a_finished_run_resumes_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CHECKPOINT", str(tmp_path))
    monkeypatch.setenv("SHOAL_RESUME", "1")
    ends = []
    for _ in range(2):
        with start() as run:
            batches = [run.step(batch) for batch in run.loader(data(), BATCH, epochs=2)]
        ends.append((len(batches), values(run)))
    assert [count for count, _ in ends] == [10, 0]
    assert same(ends[0][1], ends[1][1])


@pytest.mark.parametrize("scheduled", ["step", "lambda", "milestones", "plateau", "one cycle"])
def test_a_scheduler_goes_on(scheduled: str, tmp_path: Path) -> None:
    schedules = torch.optim.lr_scheduler
    kinds: dict[str, Any] = {
        "step": lambda o: schedules.StepLR(o, 2),
        "lambda": lambda o: schedules.LambdaLR(o, lambda k: 0.9**k),
        "milestones": lambda o: schedules.MultiStepLR(o, [2, 5]),
        "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1),
        "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=9),
    }

    def rates(run: Run, scheduler: Any, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            run.step(data()[:6])
            scheduler.step(*([1.0] if scheduled == "plateau" else []))
            found.append(scheduler.get_last_lr()[0])
        return found

    def begun() -> tuple[Run, Any]:
        model, optimizer = build(Case("auto", "momentum"))
        scheduler = kinds[scheduled](optimizer)
        return start(model=(model, optimizer), stateful={"scheduler": scheduler}), scheduler

    run, scheduler = begun()
    rates(run, scheduler, 3)
    run.save(tmp_path)
    expected = rates(run, scheduler, 5)
    again, scheduler = begun()
    again.restore(tmp_path)
    assert rates(again, scheduler, 5) == expected
    assert len(set(expected)) > 1


def test_what_is_stateful_must_have_a_state() -> None:
    with pytest.raises(BadArgument, match=r"'scheduler': int.*no method state_dict"):
        start(stateful={"scheduler": 3})
    with pytest.raises(BadArgument, match="a dict"):
        start(stateful=[3])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError):
        start().save(tmp_path / "x")


def test_a_failed_save_is_one_error_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    run = start()
    with pytest.raises(CheckpointError, match="file"):
        run.save(tmp_path / "file")
    own = start(checkpoint=tmp_path / "own", every=1)
    shutil.rmtree(tmp_path / "own", ignore_errors=True)
    (tmp_path / "own").write_text("came later")
    with caplog.at_level(logging.ERROR):
        train(own, 3)
    assert own.steps == 3
    assert "was not saved, but training continues" in caplog.text


def test_lbfgs_keeps_its_history(tmp_path: Path) -> None:
    def begun() -> Run:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 4)).double()
        return start(model=(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)))

    def steps(run: Run, count: int) -> None:
        x, y = data()[:]

        def closure() -> Tensor:
            loss = nn.functional.cross_entropy(run.model(x), y)
            run.backward(loss)
            return loss

        for _ in range(count):
            run.update(closure=closure)

    run = begun()
    steps(run, 2)
    run.save(tmp_path)
    steps(run, 2)
    again = begun()
    again.restore(tmp_path)
    steps(again, 2)
    assert same(values(run), values(again))


def test_tied_and_frozen_parameters_and_hidden_buffers_go_on(tmp_path: Path) -> None:
    class Tied(nn.Module):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
            self.second.weight = self.first.weight
            self.second.bias.requires_grad_(False)
            self.register_buffer("calls", torch.zeros(()), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            out: Tensor = self.second(self.first(x))
            return out

    def begun() -> Run:
        torch.manual_seed(0)
        model = Tied().double()
        return start(model=(model, torch.optim.Adam(model.parameters())))

    run = begun()
    train(run, 2)
    run.save(tmp_path)
    again = begun()
    again.restore(tmp_path)
    assert isinstance(again.model, Tied)
    assert again.model.first.weight is again.model.second.weight
    assert again.model.calls == 2
    train(run, 4)
    train(again, 4)
    assert same(values(run), values(again))


def test_a_learning_rate_that_is_a_tensor_stays_that_tensor(tmp_path: Path) -> None:
    def begun() -> tuple[Run, Tensor]:
        model, _ = build(Case("auto"))
        rate = torch.tensor(0.1, dtype=torch.float64)
        return start(model=(model, torch.optim.Adam(model.parameters(), lr=rate))), rate

    run, rate = begun()
    train(run, 2)
    rate.fill_(0.05)
    run.save(tmp_path)
    again, other = begun()
    again.restore(tmp_path)
    assert again.replicas["model"].optimizer.param_groups[0]["lr"] is other
    assert float(other) == 0.05
