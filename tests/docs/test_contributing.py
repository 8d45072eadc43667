"""CONTRIBUTING.md's technique really is one file: written into a copy, it keeps every law."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
TRY = """
from shoal.axes import FUNCTIONS, catalogue
from shoal.strategy import parse
from shoal.testing.contracts import check_member
from shoal.testing.trainer import LockstepTrainer, digits, tiny

check_member(FUNCTIONS["scaled_sign"])
assert "scaled_sign" in [member.name for member in catalogue()]
s = parse("error_feedback(scaled_sign), local(2)")
assert parse(repr(s)) == s
for text in ("error_feedback(scaled_sign)", "parameter_server, ssp(1), scaled_sign"):
    trainer = LockstepTrainer(parse(text), workers=2, build=tiny)
    last = trainer.train(digits(8), steps=8)
    assert last < trainer.first, (text, trainer.first, last)
print("kept")
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with the technique added as the text says: a file, and its name."""
    root = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", root / "src", ignore=ignored)
    titled = re.search(r'```python title="(.*?)"\n(.*?)```', TEXT, re.S)
    assert titled is not None
    (root / titled[1]).write_text(titled[2])
    line, name = re.findall(r"```python\n(from .*?)\n\nMEMBERS = \(\n( +\w+,\n)", TEXT, re.S)[0]
    package = (root / titled[1]).with_name("__init__.py")
    before = package.read_text()
    assert before.count("\nMEMBERS = (\n") == 1, "the text's MEMBERS is out of date"
    package.write_text(before.replace("\nMEMBERS = (\n", f"\n{line}\n\nMEMBERS = (\n{name}"))
    return root


def test_a_technique_added_as_the_text_says_keeps_every_law_and_trains(copy: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", TRY], env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "kept\n"


def test_the_text_names_only_files_that_are_there() -> None:
    for target in re.findall(r"\]\(([\w./-]+)\)", TEXT):
        assert (ROOT / target).exists(), target
