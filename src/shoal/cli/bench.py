"""``shoal bench SUITE``: run a benchmark suite, show its table, keep its numbers.

Exit codes: 0 every bar holds; 1 one does not; 2 the command will not do; 3 the machine was too
noisy for a verdict; 130 Ctrl-C: what was measured until then is shown and kept.
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

    from shoal.bench.form import Report, Result
    from shoal.bench.suites import Progress, Suite

_CASE, _NUMBERS = 24, 64  # columns of a case's name, at least, and of what stands beside it
_WIDE = 160  # columns of a file or pipe, which wraps nothing
_INTERRUPTED = 130


def bench(
    suite: str = typer.Argument("", metavar="SUITE", help="Which suite; see --list."),
    quick: bool = typer.Option(False, "--quick", help="Fewer cases and blocks: within a minute."),
    json: Path | None = typer.Option(None, "--json", metavar="PATH", help="Keep the report here."),
    ranks: str = typer.Option("", "--ranks", metavar="2,4", help="Of collectives: how many."),
    sizes: str = typer.Option("", "--sizes", metavar="4KB:64MB", help="Of collectives: messages."),
    seed: int = typer.Option(0, "--seed", min=0, help="Of data and initial parameters."),
    list_: bool = typer.Option(False, "--list", help="Show the suites and end."),
) -> None:
    """Measure Shoal against its peers. Exit code 1: a bar does not hold; 3: too noisy to tell."""
    from rich.console import Console

    from shoal import bench as benchmarks
    from shoal.bench.suites import Settings, Stopped, run

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if known else _WIDE)
    if list_:
        console.print(listing(benchmarks.SUITES))
        return
    if not suite:
        names = ", ".join(each.name for each in benchmarks.SUITES)
        raise UsageError(f"shoal bench: name a suite, one of: {names}")
    target = None if json is None else writable(json)
    chosen = tailored(benchmarks.find(suite), ranks, sizes)
    with watched(Console(stderr=True)) as progress:
        try:
            report, stopped = run(chosen, Settings(quick, seed, progress)), False
        except Stopped as stop:
            report, stopped = stop.report, True
    show(console, report)
    remark(console, chosen)
    if target is not None:
        replace_text(target, report.to_json())
        console.print(f"[dim]written to[/dim] {target}", soft_wrap=True)
        draw(console, chosen, report, target)
    if stopped:
        console.print(f"stopped: these are the {len(report.results)} results until then")
    raise typer.Exit(_INTERRUPTED if stopped else report.exit_code)


def writable(path: Path) -> Path:
    """Where ``path`` leads, after a trial that a file can be written there.

    A benchmark runs for minutes: better to hear of a typing error before than after.
    """
    target = path.expanduser().resolve()
    call = f"--json {path}"
    if target.exists() and not target.is_file():
        raise BadArgument(call, "is there already and no regular file; name a file")
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            return target
    except FileNotFoundError:
        raise BadArgument(call, f"there is no directory {target.parent}; make it first") from None
    except OSError as error:
        why = f"cannot write in {target.parent} ({error.strerror}); name another place"
        raise BadArgument(call, why) from None


def tailored(suite: Suite, ranks: str, sizes: str) -> Suite:
    """The suite, with what was asked of it; only collectives have ranks and sizes."""
    from shoal.bench import collectives

    if suite is collectives.SUITE:
        return collectives.suite(
            collectives.parse_ranks(ranks) if ranks else (),
            collectives.parse_sizes(sizes) if sizes else (),
        )
    if ranks or sizes:
        raise UsageError(
            f"shoal bench {suite.name}: --ranks and --sizes are for the suite collectives; "
            "leave them out"
        )
    return suite


def remark(console: Console, suite: Suite) -> None:
    """Which peer was not there to be measured, and why."""
    from shoal.bench import collectives, mpi_peer

    if suite.name == collectives.SUITE.name and (why := mpi_peer.find().why_not):
        console.print(f"MPI was not measured: {why}", markup=False, soft_wrap=True)


def draw(console: Console, suite: Suite, report: Report, target: Path) -> None:
    """The plots of a suite that has any, in a folder beside the report, with its name."""
    if suite.draw is None:
        return
    folder = target.with_name(f"{target.stem}-plots")
    folder.mkdir(exist_ok=True)
    count = len(list(suite.draw(report, folder)))
    console.print(f"[dim]{count} plots in[/dim] {folder}", soft_wrap=True)


@contextmanager
def watched(console: Console) -> Iterator[Progress]:
    """A live line that says what is being measured and how far it is; in a log, a line for each."""
    if not console.is_terminal:
        yield in_lines(console)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bars(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        line = bars.add_task("starting", total=None)
        yield lambda what, done, total: bars.update(
            line, description=what, completed=done, total=total
        )


def in_lines(console: Console) -> Progress:
    """Progress for a log: what is being measured, when that is something else than before."""
    begin, last = time.monotonic(), ""

    def tell(what: str, done: int, total: int) -> None:
        nonlocal last
        if what != last:
            last = what
            minutes, seconds = divmod(round(time.monotonic() - begin), 60)
            line = f"{minutes}:{seconds:02} {what} ({done} of {total})"
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    return tell


def listing(suites: tuple[Suite, ...]) -> Table:
    """The suites, one a line."""
    from rich.table import Table

    table = Table("suite", "what it measures", box=None, pad_edge=False)
    for suite in suites:
        table.add_row(suite.name, suite.summary)
    return table


def show(console: Console, report: Report) -> None:
    """A table for each metric and peer; then where and with what they were measured."""
    head, machine = report.header, report.header.machine
    longest = max((len(result.case) for result in report.results), default=0)
    width = min(longest, max(_CASE, console.width - _NUMBERS))
    for title, results in groupby(report.results, heading):
        console.print(title, style="bold", markup=False, highlight=False)
        console.print(tabled(results, width))
        console.print()
    console.print(tally(report.results), markup=False, highlight=False, soft_wrap=True)
    versions = ", ".join(f"{name} {version}" for name, version in head.versions.items())
    memory = f"{machine.memory_nbytes / 2**30:.0f} GiB"
    for line in (
        f"{head.suite}, {head.date}, seeds {', '.join(map(str, head.seeds))}",
        f"{machine.cpu}, {machine.cores} cores, {memory}, {machine.kernel}",
        f"{versions}, commit {head.commit}",
    ):
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def tally(results: Sequence[Result]) -> str:
    """How many bars hold, and which do not or are undecided."""
    barred = [result for result in results if result.bar]
    held = sum(result.holds is True for result in barred)
    lines = [f"{held} of {len(barred)} bars hold"]
    for word, those in (
        ("fails", [r for r in barred if r.holds is False]),
        ("no verdict", [r for r in barred if r.undecided]),
    ):
        lines += [f"{word}: {r.case}, {r.metric} {r.ratio or r.value:.3f} ({r.bar})" for r in those]
    return "\n".join(lines)


def heading(result: Result) -> str:
    """What the results of one table have in common."""
    return result.metric + (f" against {result.against}" if result.against else "")


def tabled(results: Iterable[Result], width: int) -> Table:
    """Results with their intervals, bars and verdicts; the cases ``width`` characters wide."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("case", width=width, overflow="fold")
    for name, columns in (("value", 8), ("ratio", 5), ("95 % interval", 14)):
        table.add_column(name, min_width=columns, justify="right", no_wrap=True)
    for name, columns in (("bar", 7), ("verdict", 10)):
        table.add_column(name, min_width=columns, no_wrap=True)
    for result in results:
        table.add_row(*cells(result))
    return table


def cells(result: Result) -> Iterator[str]:
    """One row of a table."""
    from rich.markup import escape

    interval = result.interval
    words = {True: "[green]holds[/green]", False: "[red]fails[/red]", None: ""}
    yield escape(result.case)
    yield f"{result.value:.4g} {result.unit}".rstrip()
    yield "" if result.ratio is None else f"{result.ratio:.3f}"
    yield "" if interval is None else f"{interval.low:.3f} .. {interval.high:.3f}"
    yield result.bar or ""
    yield "[yellow]no verdict[/yellow]" if result.undecided else words[result.holds]
