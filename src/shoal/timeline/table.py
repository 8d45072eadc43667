"""Format a summary as a table: mean times per step, and their shares of the wall time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.timeline.summary import Row, Summary

if TYPE_CHECKING:
    from rich.table import Table

HEADINGS = (
    "worker", "steps", "step", "compute", "data",
    "exchange", "overlapped", "exposed", "wait", "sent",
)  # fmt: skip
CAPTION = (
    "step: mean wall time; exchange = overlapped (during compute) + exposed; "
    "wait: main thread blocked; sent: per step; all: the steps of all workers"
)


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of one row as texts, in the order of ``HEADINGS``."""
    lanes = (row.compute, row.data, row.exchange, row.overlapped, row.exposed, row.wait)
    return (
        "all" if row.worker is None else str(row.worker),
        str(row.steps),
        milliseconds(row.step_seconds),
        *(f"{milliseconds(row.per_step(s))} {row.share(s):4.0%}" for s in lanes),
        size(row.nbytes / row.steps if row.steps else 0),
    )


def plain_table(summary: Summary) -> str:
    """Return the summary as plain text."""
    lines = [HEADINGS, *(cells(row) for row in (*summary.rows, summary.total))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    text = ["  ".join(map(str.rjust, line, widths)).rstrip() for line in lines]
    return "\n".join([*text, CAPTION])


def rich_table(summary: Summary, *, title: str = "Where the time of a step goes") -> Table:
    """Return the summary as a table of the package ``rich``, for a terminal."""
    from rich.table import Table

    table = Table(title=title, caption=CAPTION, title_justify="left", caption_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in summary.rows:
        table.add_row(*cells(row))
    table.add_section()
    table.add_row(*cells(summary.total), style="bold")
    return table


def milliseconds(seconds: float) -> str:
    """Return ``seconds`` as text in ms with up to 2 decimals, or in s from ten seconds on."""
    if seconds >= 10:
        return f"{seconds:.1f} s"
    ms = seconds * 1e3
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms"


def size(nbytes: float) -> str:
    """Return ``nbytes`` as text in B, kB, MB, GB or TB (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"
