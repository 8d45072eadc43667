"""Resuming as it happens: two models, restarts by the launcher, errors on all workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from resume_cases import RESUME, Case, build, data
from torch import Tensor, nn

import shoal
from shoal.errors import CheckpointError, CheckpointMismatch, CheckpointMissing
from shoal.runtime.launcher.launch import launch
from shoal.runtime.launcher.options import LaunchOptions
from shoal.testing.processes import outcomes, run_workers

pytestmark = pytest.mark.gloo


def duel(directory: str, strategy: str, kill_after: int | None = None) -> dict[str, Tensor]:
    """A generator and a discriminator, updated in turn; every=3 falls between their updates."""
    torch.manual_seed(0)
    g, d = nn.Linear(4, 12).double(), nn.Linear(12, 1).double()
    run = shoal.distribute(
        {
            "g": (g, torch.optim.Adam(g.parameters(), lr=0.01)),
            "d": (d, torch.optim.SGD(d.parameters(), lr=0.05, momentum=0.9)),
        },
        strategy=strategy,
        checkpoint=directory,
        every=3,
    )
    with run:
        for x, _ in run.loader(data(), 6, epochs=1, seed=3):
            noise = torch.randn(len(x), 4, dtype=torch.float64)
            run.backward(d(g(noise).detach()).mean() - d(x).mean(), len(x))
            run.update("d")
            run.backward(-d(g(noise)).mean(), len(x))
            run.update("g")
            d.zero_grad()  # what the generator's loss left there
            if run.steps == kill_after and run.is_main:
                os.kill(os.getpid(), signal.SIGKILL)
    pairs = [("g", g), ("d", d)]
    return {f"{n}.{k}": v.detach().clone() for n, m in pairs for k, v in m.state_dict().items()}


@pytest.mark.parametrize("strategy", ["auto", "local(3)"])
def test_two_models_go_on_with_no_update_lost(strategy: str, tmp_path: Path) -> None:
    whole = run_workers(2, duel, str(tmp_path / "whole"), strategy)
    killed = outcomes(2, duel, str(tmp_path / "cut"), strategy, 6)
    assert killed[0].exitcode == -signal.SIGKILL
    assert [p.name for p in (tmp_path / "cut").glob("step-*")] == ["step-00000004"]
    resumed = run_workers(2, duel, str(tmp_path / "cut"), strategy, env=RESUME)
    for a, b in zip(whole, resumed, strict=True):
        for name in a:
            assert torch.equal(a[name], b[name]), name


def refused(directory: str) -> list[str]:
    """What restoring and saving say on each worker; training goes on after each."""
    model, optimizer = build(Case("auto"))
    run = shoal.distribute(model, optimizer, loss=nn.functional.cross_entropy)
    said = []
    with run:
        for place in ("missing", "other", "unwritable"):
            try:
                if place == "unwritable":
                    run.save(Path(directory) / "file")
                else:
                    run.restore(Path(directory) / place)
            except (CheckpointMissing, CheckpointMismatch, CheckpointError) as error:
                said.append(f"{type(error).__name__}: {error}")
            run.step(data()[: 4 + run.rank])
    return said


def other_model(directory: str) -> None:
    """A checkpoint of another model."""
    model = nn.Linear(12, 4).double()
    run = shoal.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.MSELoss())
    with run:
        run.save(Path(directory) / "other")


def test_every_worker_sees_the_same_error_and_goes_on(tmp_path: Path) -> None:
    run_workers(2, other_model, str(tmp_path))
    (tmp_path / "file").write_text("in the way")
    first, second = run_workers(2, refused, str(tmp_path))
    assert first == second
    missing, mismatch, unwritable = first
    assert missing.startswith("CheckpointMissing")
    assert mismatch.startswith("CheckpointMismatch")
    assert "0.weight" in mismatch
    assert unwritable.startswith("CheckpointError")
    assert "file" in unwritable


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import torch, shoal
from resume_cases import Case, build, data
model, optimizer = build(Case("auto"))
run = shoal.distribute(model, optimizer, loss=torch.nn.functional.cross_entropy, every=2)
started = run.steps
with run:
    for batch in run.loader(data(), 6, epochs=2, seed=3):
        run.step(batch)
        if run.steps == 5 and not started and {dies} and run.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
if run.is_main:
    torch.save((started, model.state_dict()), {out!r})
"""


@pytest.mark.slow
def test_a_restart_by_the_launcher_takes_up_the_checkpoint(tmp_path: Path) -> None:
    ends = {}
    for dies in (True, False):
        script, out = tmp_path / f"train{dies}.py", tmp_path / f"end{dies}"
        tests = str(Path(__file__).parent)
        script.write_text(SCRIPT.format(tests=tests, dies=dies, out=str(out)))
        options = LaunchOptions(2, max_restarts=1, checkpoint=tmp_path / f"saved{dies}")
        assert launch([str(script)], options) == 0
        ends[dies] = torch.load(out, weights_only=True)
    assert ends[True][0] == 4, "it had died after step 5, and step 4 was saved"
    for name, value in ends[False][1].items():
        assert torch.equal(value, ends[True][1][name]), name
