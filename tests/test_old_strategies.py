"""Strategy lines that older code read mean the same today."""

from __future__ import annotations

from pathlib import Path

import pytest

import shoal

LISTED = Path(__file__).parent / "fixtures" / "strategies.txt"
LINES = [line.split("\t") for line in LISTED.read_text().splitlines()]


def test_there_are_hundreds_of_lines() -> None:
    assert len(LINES) > 300
    assert all(len(line) == 2 for line in LINES)


@pytest.mark.parametrize(("text", "form"), LINES, ids=[text for text, _ in LINES])
def test_a_line_has_the_form_recorded(text: str, form: str) -> None:
    strategy = shoal.parse(text)
    assert repr(strategy) == form
    assert shoal.parse(form) == strategy
