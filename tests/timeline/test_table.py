"""Laws of the tables."""

from __future__ import annotations

import io

import pytest

from shoal.timeline import Span, Timeline, plain_table, rich_table
from shoal.timeline.table import HEADINGS, cells, milliseconds, size

SUMMARY = Timeline(
    [
        Span(0, "compute", "forward", 0.0, 0.08, 0, 0),
        Span(0, "exchange", "bucket", 0.06, 0.04, 2_000_000, 0),
        Span(1, "compute", "forward", 0.0, 0.1, 0, 0),
    ]
).summary()


def test_a_row_says_time_and_share() -> None:
    found = dict(zip(HEADINGS, cells(SUMMARY.rows[0]), strict=True))
    assert found["step"] == "100 ms"
    assert found["compute"] == "80.0 ms  80%"
    assert found["overlapped"] == "20.0 ms  20%"
    assert found["exposed"] == "20.0 ms  20%"
    assert found["sent"] == "2.0 MB"


def test_the_plain_table_has_a_line_for_each_worker_and_all() -> None:
    lines = plain_table(SUMMARY).splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["worker", "0", "1", "all"]
    assert len({len(line) for line in lines[:-1]}) == 1


def test_both_tables_say_the_same() -> None:
    from rich.console import Console

    console = Console(width=200, file=io.StringIO())
    console.print(rich_table(SUMMARY))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for row in (*SUMMARY.rows, SUMMARY.total):
        assert all(cell in text for cell in cells(row))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.00 ms"), (0.00123, "1.23 ms"), (0.0123, "12.3 ms"), (0.5, "500 ms"), (12, "12.0 s")],
)
def test_times_have_three_figures(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1e3, "1.0 kB"),
        (2.5e6, "2.5 MB"),
        (4e9, "4.0 GB"),
        (3e15, "3000.0 TB"),
    ],
)
def test_sizes_go_by_thousands(nbytes: float, text: str) -> None:
    assert size(nbytes) == text
