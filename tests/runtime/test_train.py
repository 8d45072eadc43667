"""The short form: ``shoal.train`` is the loop that one would have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from resume_cases import Case, build, data
from torch import Tensor, nn

import shoal
from shoal.errors import UnknownName
from shoal.testing.processes import run_workers


def short(steps: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """Trained by the short form."""
    model, optimizer = build(Case("auto"))
    options: dict[str, Any] = {"batch_size": 6, "epochs": 2, "seed": 3, **(steps or {})}
    run = shoal.train(model, optimizer, data(), loss=nn.functional.cross_entropy, **options)
    assert run.steps == 10
    return {n: t.clone() for n, t in model.state_dict().items()}


def loop() -> dict[str, Tensor]:
    """Trained by hand."""
    model, optimizer = build(Case("auto"))
    run = shoal.distribute(model, optimizer, loss=nn.functional.cross_entropy)
    with run:
        for batch in run.loader(data(), 6, epochs=2, seed=3):
            run.step(batch)
    return {n: t.clone() for n, t in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_short_form_is_the_loop() -> None:
    assert same(short(), loop())


@pytest.mark.gloo
def test_on_two_workers_too() -> None:
    for one, other in zip(run_workers(2, short), run_workers(2, loop), strict=True):
        assert same(one, other)


def test_it_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = {"checkpoint": tmp_path, "every": 4}
    whole = short(saves)
    for late in ("step-00000008", "step-00000010"):
        (tmp_path / late / "manifest.json").unlink()
    monkeypatch.setenv("SHOAL_RESUME", "1")
    assert same(short(saves), whole)


def test_options_of_loader_and_run_are_told_apart_and_others_refused() -> None:
    assert short({"clip": 1e9, "shuffle": True, "accumulate": 2})
    with pytest.raises(UnknownName, match="epochs"):
        short({"epoch": 2})


def test_the_run_comes_back_finished() -> None:
    model, optimizer = build(Case("auto"))
    run = shoal.train(model, optimizer, data(), loss=nn.functional.cross_entropy, batch_size=14)
    scores = run.evaluate(data(), metrics={"accuracy": shoal.accuracy})
    assert set(scores) == {"loss", "accuracy"}
    assert run.steps == 2


def test_a_terminal_sees_progress(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    short()
    assert "10/10" in capsys.readouterr().err
