"""Every example runs as its docstring says: alone, and on two workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))
ARGUMENTS = {
    "char_lm": "--epochs 1 --width 32 --write 20",
    "digits": "--epochs 2",
    "huggingface": "--epochs 2",
    "own_loop": "--epochs 2 --samples 1000",
    "resume": "--epochs 2 --every 5",
}
SAID = {  # what each says at its end
    "char_lm": r"loss \d\.\d+ after 8 steps",
    "digits": r"test accuracy(.|\n)*\d+\.\d%",
    "huggingface": r"loss \d\.\d+ after 14 steps",
    "own_loop": r"epoch  1   loss",
    "resume": r"accuracy \d+\.\d%   sum",
}

each = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def start(command: list[str], where: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=where, env=env, capture_output=True, text=True, timeout=240
    )


def on_two(path: Path, where: Path, *options: str, script: str = "") -> str:
    words = script or ARGUMENTS[path.stem]
    ran = start(["-m", "shoal", "run", *options, str(path), "-n", "2", "--", *words.split()], where)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


@each
def test_an_example_is_one_short_file_that_the_tests_run(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 80
    assert f"shoal run examples/{path.name}" in text, "its docstring shows how to run it"
    assert path.stem in ARGUMENTS


@each
def test_an_example_runs_alone(path: Path, tmp_path: Path) -> None:
    ran = start([str(path), *ARGUMENTS[path.stem].split()], tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert re.search(SAID[path.stem], ran.stdout)


@pytest.mark.gloo
@each
def test_an_example_runs_on_two_workers_and_ends_with_where_the_time_went(
    path: Path, tmp_path: Path
) -> None:
    said = on_two(path, tmp_path)
    assert re.search(SAID[path.stem], said)
    for word in ("compute", "exchange", "wait", "data"):
        assert word in said
    found = [tmp_path / name for name in re.findall(r"\S+/timeline\.(?:html|json)", said)]
    assert len(found) == 2
    assert all(path.stat().st_size > 1000 for path in found)


@pytest.mark.gloo
def test_what_is_killed_and_resumed_ends_with_the_same_numbers(tmp_path: Path) -> None:
    path, words = EXAMPLES / "resume.py", ARGUMENTS["resume"]
    whole = on_two(path, tmp_path, script=f"{words} --checkpoints whole")
    died = on_two(
        path, tmp_path, "--max-restarts", "1", script=f"{words} --checkpoints died --die-at 8"
    )
    assert "resumed at step 5" in died
    assert re.findall("loss .* sum .*", died) == re.findall("loss .* sum .*", whole)
