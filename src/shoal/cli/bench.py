"""``shoal bench SUITE``: run a benchmark suite, print its tables, and write its report.

The exit code is 0 if all thresholds are met, 1 if one fails, 2 if the command line is wrong, and 3
if none fails but one is inconclusive. After Ctrl-C it is 130, and the results so far are printed
and written.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shoal.errors import BadArgument, UsageError
from shoal.timeline.files import replace_text

if TYPE_CHECKING:  # rich and the suites load when the command runs, not when it is listed
    from rich.console import Console
    from rich.table import Table

    from shoal.bench.report import Report, Result
    from shoal.bench.suites import Progress, Suite

_CASE_COLUMNS, _OTHER_COLUMNS = 24, 68  # least width of the case names, and width of the rest
_FILE_COLUMNS = 160  # used if stdout is a file or pipe, which has no width
_INTERRUPTED = 130


def bench(
    suite: str = typer.Argument("", metavar="SUITE", help="Which suite; see --list."),
    quick: bool = typer.Option(False, "--quick", help="Fewer cases and blocks: within a minute."),
    json: Path | None = typer.Option(None, "--json", metavar="PATH", help="Keep the report here."),
    ranks: str = typer.Option(
        "", "--ranks", metavar="2,4", help="For collectives: how many ranks."
    ),
    sizes: str = typer.Option("", "--sizes", metavar="4KB:64MB", help="For collectives: sizes."),
    seed: int = typer.Option(0, "--seed", min=0, help="Seed of data and initial parameters."),
    list_: bool = typer.Option(False, "--list", help="Show the suites and end."),
) -> None:
    """Measure Shoal against its peers. Exit code 1: a threshold fails; 3: one is inconclusive."""
    from rich.console import Console

    from shoal import bench as benchmarks
    from shoal.bench.suites import BenchSettings, Stopped, run

    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if has_width else _FILE_COLUMNS)
    if list_:
        console.print(suite_table(benchmarks.all_suites()))
        return
    if not suite:
        names = ", ".join(each.name for each in benchmarks.all_suites())
        raise UsageError(f"shoal bench needs the name of a suite; choose one of: {names}")
    target = None if json is None else writable(json)
    chosen = with_options(benchmarks.find(suite), ranks, sizes)
    with live_progress(Console(stderr=True)) as progress:
        try:
            report, stopped = run(chosen, BenchSettings(quick, seed, progress)), False
        except Stopped as stop:
            report, stopped = stop.report, True
    show(console, report)
    show_missing_peer(console, chosen)
    if target is not None:
        replace_text(target, report.to_json())
        console.print(f"[dim]written to[/dim] {target}", soft_wrap=True)
        draw(console, chosen, report, target)
    if stopped:
        console.print(f"stopped by Ctrl-C: only {len(report.results)} results were measured")
    raise typer.Exit(_INTERRUPTED if stopped else report.exit_code)


def writable(path: Path) -> Path:
    """Return the resolved path, after checking that a file can be written there.

    A benchmark runs for minutes, so a wrong path must raise an error before it starts.
    """
    target = path.expanduser().resolve()
    call = f"--json {path}"
    if target.exists() and not target.is_file():
        raise BadArgument(call, "the path exists and is not a regular file; choose a file")
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            return target
    except FileNotFoundError:
        raise BadArgument(call, f"there is no directory {target.parent}; make it first") from None
    except OSError as error:
        why = f"{target.parent} cannot be written ({error.strerror}); choose another directory"
        raise BadArgument(call, why) from None


def with_options(suite: Suite, ranks: str, sizes: str) -> Suite:
    """Return the suite with --ranks and --sizes applied, which only the suite collectives has."""
    from shoal.bench.collectives import suite as collectives

    if suite is collectives.SUITE:
        return collectives.suite(
            collectives.parse_ranks(ranks) if ranks else (),
            collectives.parse_sizes(sizes) if sizes else (),
        )
    if ranks or sizes:
        raise UsageError(
            f"shoal bench {suite.name}: only the suite collectives has --ranks and --sizes; "
            "leave them out"
        )
    return suite


def show_missing_peer(console: Console, suite: Suite) -> None:
    """If the suite is collectives and could not measure MPI, print why."""
    from shoal.bench.collectives import mpi_peer

    if suite.name == "collectives" and (why := mpi_peer.find_mpi().why_not):
        console.print(f"MPI was not measured: {why}", markup=False, soft_wrap=True)


def draw(console: Console, suite: Suite, report: Report, target: Path) -> None:
    """Write the suite's plots, if it has any, into a folder beside the report."""
    if suite.draw is None:
        return
    folder = target.with_name(f"{target.stem}-plots")
    folder.mkdir(exist_ok=True)
    count = len(list(suite.draw(report, folder)))
    console.print(f"[dim]{count} plots in[/dim] {folder}", soft_wrap=True)


@contextmanager
def live_progress(console: Console) -> Iterator[Progress]:
    """Yield a function that shows progress, as a bar on a terminal and as lines elsewhere."""
    if not console.is_terminal:
        yield line_progress(console)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bars(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        line = bars.add_task("starting", total=None)
        yield lambda what, done, total: bars.update(
            line, description=what, completed=done, total=total
        )


def line_progress(console: Console) -> Progress:
    """Return a function that prints one line whenever another measurement starts."""
    begin, previous = time.monotonic(), ""

    def progress(what: str, done: int, total: int) -> None:
        nonlocal previous
        if what != previous:
            previous = what
            minutes, seconds = divmod(round(time.monotonic() - begin), 60)
            line = f"{minutes}:{seconds:02} {what} ({done} of {total})"
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    return progress


def suite_table(suites: tuple[Suite, ...]) -> Table:
    """Return a table with one suite in each line."""
    from rich.table import Table

    table = Table("suite", "what it measures", box=None, pad_edge=False)
    for suite in suites:
        table.add_row(suite.name, suite.summary)
    return table


def show(console: Console, report: Report) -> None:
    """Print a table for each metric and competitor, a summary, the machine and the versions."""
    head, machine = report.header, report.header.machine
    longest = max((len(result.case) for result in report.results), default=0)
    width = min(longest, max(_CASE_COLUMNS, console.width - _OTHER_COLUMNS))
    for title, results in groupby(report.results, heading):
        console.print(title, style="bold", markup=False, highlight=False)
        console.print(result_table(results, width))
        console.print()
    console.print(summary(report.results), markup=False, highlight=False, soft_wrap=True)
    versions = ", ".join(f"{name} {version}" for name, version in head.versions.items())
    memory = f"{machine.memory_nbytes / 2**30:.0f} GiB"
    for line in (
        f"{head.suite}, {head.date}, seeds {', '.join(map(str, head.seeds))}",
        f"{machine.cpu}, {machine.cores} cores, {memory}, {machine.kernel}",
        f"{versions}, commit {head.commit}",
    ):
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def summary(results: Sequence[Result]) -> str:
    """Return a text that tells how many thresholds pass, and which fail or are inconclusive."""
    judged = [result for result in results if result.threshold]
    lines = [f"{sum(r.passes is True for r in judged)} of {len(judged)} thresholds pass"]
    failed = [("fail", r) for r in judged if r.passes is False]
    for word, r in failed + [("inconclusive", r) for r in judged if r.inconclusive]:
        lines += [f"{word}: {r.case}, {r.metric} {r.ratio or r.value:.3f} ({r.threshold})"]
    return "\n".join(lines)


def heading(result: Result) -> str:
    """Return a result's table title, which names its metric and what it is compared with."""
    return result.metric + (f" against {result.against}" if result.against else "")


def result_table(results: Iterable[Result], width: int) -> Table:
    """Return a table of results, whose column of cases is ``width`` characters wide."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("case", width=width, overflow="fold")
    for name, columns in (("value", 8), ("ratio", 5), ("95 % interval", 14)):
        table.add_column(name, min_width=columns, justify="right", no_wrap=True)
    for name, columns in (("threshold", 9), ("verdict", 12)):
        table.add_column(name, min_width=columns, no_wrap=True)
    for result in results:
        table.add_row(*cells(result))
    return table


def cells(result: Result) -> Iterator[str]:
    """Yield the cells of one row of the result table."""
    from rich.markup import escape

    interval = result.interval
    verdicts = {True: "[green]pass[/green]", False: "[red]fail[/red]", None: ""}
    yield escape(result.case)
    yield f"{result.value:.4g} {result.unit}".rstrip()
    yield "" if result.ratio is None else f"{result.ratio:.3f}"
    yield "" if interval is None else f"{interval.low:.3f} .. {interval.high:.3f}"
    yield result.threshold or ""
    yield "[yellow]inconclusive[/yellow]" if result.inconclusive else verdicts[result.passes]
