"""Whenever a save dies, the last good checkpoint is there, and the next save works."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from checkpoint_forms import small

from shoal.checkpoint import SaveOptions, load, save
from shoal.errors import CheckpointError

CALLS = ["open", "write", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "close"]


@contextmanager
def counted(at: int | None, happens: Callable[[str], None]) -> Iterator[list[str]]:
    """Count calls to the filesystem; ``happens`` instead of the one with number ``at``."""
    real = {name: getattr(os, name) for name in CALLS}
    seen: list[str] = []

    def stand_in(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            if at == len(seen) - 1:
                happens(name)
            return real[name](*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, stand_in(name))
    try:
        yield seen
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def fail(name: str) -> None:
    raise OSError(5, f"injected into {name}")


def die(name: str) -> None:
    os._exit(9)


def check(root: Path, *, step: int) -> None:
    """The old or the new checkpoint loads, whole; a further save works and leaves no rubbish."""
    loaded = load(root, rank=0, size=1)
    assert loaded.step in (20, step)
    assert loaded.shared["model"]["w"][0, 0].item() == loaded.meta["value"]
    assert loaded.mine is not None
    save(root, small(99), step=99, options=SaveOptions(keep=2))
    assert load(root, rank=0, size=1).step == 99
    names = sorted(p.name for p in root.iterdir())
    assert names[0] == ".lock"
    assert len(names) == 3
    for path in root.glob("step-*"):
        assert len(list(path.iterdir())) == 2, "leftovers beside data and manifest"


def prepare(root: Path) -> None:
    for step in (10, 20):
        save(root, stamped(step, step), step=step)


def stamped(step: int, value: int) -> Any:
    state = small(value)
    return type(state)(state.shared, state.mine, {"step": step, "value": value})


def calls_of_a_save(root: Path, step: int) -> int:
    prepare(root)
    with counted(None, fail) as seen:
        save(root, stamped(step, 77), step=step, options=SaveOptions(keep=2))
    return len(seen)


@pytest.mark.parametrize("step", [30, 20], ids=["new step", "same step again"])
def test_a_failure_of_any_call_to_the_filesystem_leaves_a_good_checkpoint(
    step: int, tmp_path: Path
) -> None:
    total = calls_of_a_save(tmp_path / "count", step)
    assert total > 15
    for at in range(total):
        root = tmp_path / str(at)
        prepare(root)
        # late failures are only warned of: the new checkpoint is safe by then
        with counted(at, fail) as seen, suppress(CheckpointError):
            save(root, stamped(step, 77), step=step, options=SaveOptions(keep=2))
        assert seen[at:]
        check(root, step=step)


@contextmanager
def forked(work: Callable[[], None]) -> Iterator[int]:
    """A child that does ``work``: forked, since importing torch anew takes seconds."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _die_at(root: Path, step: int, at: int) -> None:
    with counted(at, die):
        save(root, stamped(step, 77), step=step, options=SaveOptions(keep=2))


@pytest.mark.gloo
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork beside threads
@pytest.mark.parametrize("step", [30, 20], ids=["new step", "same step again"])
def test_death_at_any_call_to_the_filesystem_leaves_a_good_checkpoint(
    step: int, tmp_path: Path
) -> None:
    total = calls_of_a_save(tmp_path / "count", step)
    for at in range(total):
        root = tmp_path / str(at)
        prepare(root)
        with forked(lambda root=root, at=at: _die_at(root, step, at)) as pid:
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            assert status is not None
            assert status.si_status == 9
        check(root, step=step)


def _save_forever(root: Path, first: int) -> None:
    for value in range(first, first + 100_000):  # each step twice: new, and again
        save(root, stamped(value // 2, value), step=value // 2, options=SaveOptions(keep=2))


@pytest.mark.gloo
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_kill_9_at_20_random_moments_always_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    dice = random.Random(1)
    value = 0
    save(tmp_path, stamped(0, 0), step=0)
    for _ in range(20):
        with forked(lambda first=value + 1: _save_forever(tmp_path, first)):
            time.sleep(dice.uniform(0.05, 0.25))
        loaded = load(tmp_path, rank=0, size=1)
        assert loaded.shared["model"]["w"][0, 0].item() == loaded.meta["value"]
        assert loaded.meta["value"] >= value
        value = int(loaded.meta["value"])
    assert value > 0, "no save ended between the kills"
    save(tmp_path, stamped(value, value), step=value, options=SaveOptions(keep=1))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", f"step-{value:08d}"]
