"""Which checkpoints a run refuses, and what it does instead; in one process."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_cases import BATCH, Case, build, data
from saving_runs import same, start, train, values
from torch import nn

from shoal.checkpoint import save as save_plain
from shoal.checkpoint.state import State
from shoal.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    CheckpointMissing,
)


def test_a_missing_checkpoint_is_an_error_only_where_one_was_named(tmp_path: Path) -> None:
    run = start(checkpoint=tmp_path / "none")
    assert run.restore() is False
    with pytest.raises(CheckpointMissing, match="nowhere"):
        run.restore(tmp_path / "nowhere")


def test_damage_falls_back_to_the_previous_one_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start()
    train(run, 1)
    run.save(tmp_path)
    before = values(run)
    train(run, 2)
    newest = run.save(tmp_path)
    spoil = next(newest.glob("*.bin"))
    spoil.write_bytes(bytes([spoil.read_bytes()[0] ^ 1]) + spoil.read_bytes()[1:])
    with pytest.raises(CheckpointCorrupt):
        run.restore(newest)
    assert run.steps == 2, "a refused checkpoint changes nothing"
    with caplog.at_level(logging.INFO):
        assert run.restore(tmp_path)
    assert run.steps == 1
    assert same(values(run), before)
    assert "using previous checkpoint step 1" in caplog.text


def wider() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(Case("auto"))[0]
    model.add_module("3", nn.Linear(10, 9).double())
    return model, torch.optim.Adam(model.parameters())


def renamed() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(build(Case("auto"))[0])
    return model, torch.optim.Adam(model.parameters())


def single() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(Case("auto"))[0].float()
    return model, torch.optim.Adam(model.parameters())


def other_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    return build(Case("auto", "sgd"))


def two_groups() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(Case("auto"))[0]
    groups = [{"params": [p]} for p in model.parameters()]
    return model, torch.optim.Adam(groups)


def fewer_trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(Case("auto"))[0]
    return model, torch.optim.Adam(list(model.parameters())[:-1])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (wider, r"3\.weight has shape \(9, 10\)"),
        (renamed, r"0\.0\.weight is in the model"),
        (single, r"0\.weight is torch\.float32"),
        (other_optimizer, "optimizer is Adam, this one is SGD"),
        (two_groups, "1 parameter groups, this one 6"),
        (fewer_trained, r"5\.bias is in group 0 of the checkpoint's optimizer"),
    ],
)
def test_another_model_or_optimizer_is_refused_and_nothing_changes(
    make: Any, said: str, tmp_path: Path
) -> None:
    run = start()
    train(run, 2)
    run.save(tmp_path)
    other = start(model=make())
    before = values(other)
    with pytest.raises(CheckpointMismatch, match=said):
        other.restore(tmp_path)
    assert same(values(other), before)
    assert other.steps == 0
    assert not other.replicas["model"].optimizer.state


def test_a_checkpoint_that_no_run_saved_is_refused(tmp_path: Path) -> None:
    save_plain(tmp_path, State({"model": {}}), step=3)
    with pytest.raises(CheckpointMismatch, match="not saved by a run"):
        start().restore(tmp_path)


def test_another_dataset_is_refused(tmp_path: Path) -> None:
    run = start()
    train(run, 2)
    run.save(tmp_path)
    other = start()
    other.loader(range(5), 2)
    before = values(other)
    with pytest.raises(CheckpointMismatch, match="length"):
        other.restore(tmp_path)
    assert same(values(other), before)
    late = start()
    late.restore(tmp_path)
    with pytest.raises(CheckpointMismatch, match="seed"):
        late.loader(data(), BATCH, epochs=9, seed=5)
