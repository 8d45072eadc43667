"""Loggers receive what steps came to, on the main worker."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import UsageError
from shoal.loggers import MLflow, TensorBoard, WandB
from shoal.testing.trainer import digits, tiny


class Kept:
    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, float], int]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.seen.append((dict(metrics), step))


def test_a_logger_hears_of_every_step() -> None:
    kept = Kept()
    model, optimizer = tiny()
    run = shoal.distribute(model, optimizer, loss=torch.nn.functional.cross_entropy, logger=kept)
    losses = [run.step(digits(8)[0]).loss for _ in range(3)]
    assert [step for _, step in kept.seen] == [0, 1, 2]
    assert [metrics["loss"] for metrics, _ in kept.seen] == losses


def test_tensorboard_writes_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logger = TensorBoard(str(tmp_path))
    logger.log({"loss": 1.0}, 0)
    assert any(path.name.startswith("events") for path in tmp_path.iterdir())


@pytest.mark.parametrize(("made", "module"), [(WandB, "wandb"), (MLflow, "mlflow")])
def test_a_missing_package_is_named(
    made: Any, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=f"shoal\\[{module}\\]"):
        made()


def test_other_loggers_pass_numbers_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    run = SimpleNamespace(log=lambda metrics, step: told.append((metrics, step)))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    flow = SimpleNamespace(
        start_run=lambda **_: None,
        log_metrics=lambda metrics, step: told.append((metrics, step)),
    )
    monkeypatch.setitem(sys.modules, "mlflow", flow)
    WandB(project="x").log({"loss": 1.0}, 2)
    MLflow().log({"loss": 2.0}, 3)
    assert told == [({"loss": 1.0}, 2), ({"loss": 2.0}, 3)]
