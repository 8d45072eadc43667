"""README and docs can be read in a terminal: prose has at most 120 characters a line."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_prose_are_short(page: Path) -> None:
    inside_code, long = False, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside_code = not inside_code
        elif not inside_code and not line.startswith("|") and len(line) > 120:
            long.append(number)
    assert not long
