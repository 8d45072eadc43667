"""The README's first screen is true: its lines run, its tree and its links are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import axes
from shoal.errors import ConflictError
from shoal.strategy import parse

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def script(where: Path) -> Path:
    found = re.search(r"```python\n(.*?)```", TEXT, re.S)
    assert found is not None
    path = where / "train.py"
    path.write_text(found[1])
    return path


@pytest.mark.gloo
@pytest.mark.parametrize("start", [[], ["-m", "shoal", "run", "-n", "2"]], ids=["alone", "on two"])
def test_the_first_lines_run(start: list[str], tmp_path: Path) -> None:
    command = [sys.executable, *start, str(script(tmp_path))]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    told = re.search(r"'accuracy': (0\.\d+)", ran.stdout)
    assert told is not None
    assert float(told[1]) > 0.8


def test_the_first_lines_are_about_ten(tmp_path: Path) -> None:
    assert len(script(tmp_path).read_text().splitlines()) <= 13


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_strategy_a_page_shows_is_legal_or_said_to_be_refused(page: Path) -> None:
    for line in page.read_text().splitlines():
        for text in re.findall(r'(?:--strategy|shoal explain) "([^"]+)"', line):
            if text in ("...", "<strategy>", "error_feedback(scaled_sign)"):
                continue
            if line.startswith("$"):  # a session that shows the error
                with pytest.raises(ConflictError):
                    parse(text)
            else:
                assert parse(text)


def test_the_error_it_shows_is_the_error_one_gets() -> None:
    with pytest.raises(ConflictError) as caught:
        parse("all_reduce, asp")
    assert f"shoal: {caught.value}" in TEXT


def test_the_table_lists_every_answer() -> None:
    for axis, functions in axes.AXES.items():
        row = next(line for line in TEXT.splitlines() if f"| {axis} |" in line)
        assert re.findall(r"`(\w+)`", row) == [function.__name__ for function in functions]


def test_the_tree_is_the_tree() -> None:
    tree = TEXT.partition("## The tree")[2].partition("```\n")[2].partition("```")[0]
    inside = [line for line in tree.splitlines() if line[:1] in "├└"]
    named = {n.rstrip("/") for line in inside for n in re.findall(r"(\w+(?:/|\.py))(?=\s)", line)}
    here = {path.name for path in (ROOT / "src" / "shoal").iterdir()}
    known = {"__init__.py", "__main__.py", "__pycache__", "py.typed", "errors.py"}
    assert here - known == named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    made = {"compatibility.md", "references.md", "axes/index.md"}  # by docs/generate.py
    made |= {f"axes/{axis}.md" for axis in axes.AXES}
    for target in re.findall(r"\]\((?!https?:)([\w./-]+)\)", page.read_text()):
        assert target in made or (page.parent / target).exists(), target
