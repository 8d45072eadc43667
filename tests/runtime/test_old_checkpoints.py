"""Checkpoints that older code wrote are restored, and training goes on as it did then."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from old_runs import CHECKPOINTS, FAMILIES, expected, restored, restored_alone, several

import shoal
from shoal.testing.processes import WorkersFailed, run_workers

every_family = pytest.mark.parametrize("name", FAMILIES)
TOGETHER = [name for name, f in FAMILIES.items() if f.workers == 2 and not f.servers]


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of all checkpoints, for nothing may write into the fixtures."""
    return Path(shutil.copytree(CHECKPOINTS, tmp_path_factory.mktemp("old") / "checkpoints"))


@pytest.fixture(scope="module")
def found(copies: Path) -> dict[str, list[Any]]:
    """What two workers restored of one family after the other, by family.

    It is empty when a family failed: then each family gets workers of its own, so that one failure
    does not hide the others.
    """
    try:
        workers = run_workers(2, several, restored, TOGETHER, str(copies), seconds=90)
    except WorkersFailed:
        return {}
    return {name: [worker[name] for worker in workers] for name in TOGETHER}


def restored_by_all(name: str, copies: Path, found: dict[str, list[Any]]) -> list[Any]:
    if name in found:
        return found[name]
    f = FAMILIES[name]
    return run_workers(f.workers, restored, f, str(copies / name), servers=f.servers, seconds=60)


def dealt(recorded: list[Any], workers: int) -> list[Any]:
    """One record for each worker; what all held alike was written down once."""
    return recorded * workers if len(recorded) == 1 else recorded


def assert_near(now: dict[str, Any], then: dict[str, Any], atol: float) -> None:
    assert now.keys() == then.keys()
    for name in then:
        one, other = (torch.tensor(held[name], dtype=torch.float64) for held in (now, then))
        torch.testing.assert_close(one, other, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_loss(now: dict[str, Any], then: dict[str, Any]) -> None:
    """A run of two models has none."""
    one, other = now["agreed_loss"], then["agreed_loss"]
    assert one == other or one == pytest.approx(other, rel=1e-6)


def test_every_checkpoint_has_its_training() -> None:
    assert {path.name for path in CHECKPOINTS.iterdir()} == set(FAMILIES)


@every_family
def test_one_worker_restores_the_agreed_model(name: str, copies: Path) -> None:
    then, now = expected(name), restored_alone(FAMILIES[name], str(copies / name))
    assert now["step"] == then["step"]
    assert now["rate"] == then["rate"]
    assert_near(now["agreed"], then["agreed"], atol=0)
    assert_same_loss(now, then)


@pytest.mark.gloo
@every_family
def test_as_many_workers_go_on_as_they_did(
    name: str, copies: Path, found: dict[str, list[Any]]
) -> None:
    then, now = expected(name), restored_by_all(name, copies, found)
    workers = FAMILIES[name].workers
    for worker, saved, end, samples in zip(
        now,
        dealt(then["saved"], workers),
        dealt(then["end"], workers),
        then["samples"],
        strict=True,
    ):
        assert worker["step"] == then["step"]
        assert worker["rate"] == then["rate"]
        assert_same_loss(worker, then)
        assert_near(worker["saved"], saved, atol=0)
        assert worker["samples"] == samples
        assert worker["end_rate"] == then["end_rate"]
        assert_near(worker["end"], end, atol=1e-6)


SCRIPT = """
import json, sys
sys.path.insert(0, {tests!r})
from old_runs import FAMILIES, advance, build, distributed, ending, standing
family = FAMILIES[{name!r}]
parts = build(family)
with distributed(family, parts, None, every=100) as run:
    found = standing(run, family, parts)
    seen = advance(run, family, parts, family.end)
    found |= ending(run, family, parts, seen)
if run.is_main:
    open({out!r}, "w").write(json.dumps(found))
"""


@pytest.mark.gloo
def test_the_command_line_resumes_an_old_checkpoint(tmp_path: Path) -> None:
    name = "error_feedback_topk"
    copy = shutil.copytree(CHECKPOINTS / name, tmp_path / "saved")
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), name=name, out=str(out)))
    command = ["run", "-n", "2", "--resume", "--checkpoint", str(copy), "--oversubscribe"]
    strategy = ["--strategy", FAMILIES[name].strategy]
    shell = [sys.executable, "-m", "shoal", *command, *strategy, str(script)]
    done = subprocess.run(shell, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    now, then = json.loads(out.read_text()), expected(name)
    assert now["step"] == then["step"]
    assert_near(now["saved"], then["saved"][0], atol=0)
    assert_near(now["end"], then["end"][0], atol=1e-6)


@every_family
def test_the_strategy_recorded_is_the_family_s(name: str) -> None:
    assert repr(shoal.parse(FAMILIES[name].strategy)) == expected(name)["strategy"]
