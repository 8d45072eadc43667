"""``shoal run train.py -n 4 --strategy "..."``: train a script on several workers."""

from __future__ import annotations

import difflib
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.runtime.launcher.options import LaunchOptions
    from shoal.strategy import Strategy
    from shoal.testbed.plan import TestbedPlan

TABLE_COLUMNS = 120


def run(
    context: typer.Context,
    script: str = typer.Argument(..., help="The training script."),
    workers: str = typer.Option("1", "-n", "--workers", help="Workers on this machine."),
    strategy: str | None = typer.Option(None, "--strategy", "-s", help="How to train, in a line."),
    backend: str | None = typer.Option(None, help="gloo, nccl or shoal; see docs."),
    output: str = typer.Option("main", help="main: rank 0's output; all: everybody's, prefixed."),
    resume: bool = typer.Option(False, "--resume", help="Go on from the last checkpoint."),
    checkpoint: Path | None = typer.Option(None, help="Directory of checkpoints."),
    max_restarts: int = typer.Option(0, help="Start again that often after a failure."),
    timeout: float | None = typer.Option(None, help="Seconds an exchange may take."),
    directory: Path | None = typer.Option(None, "--dir", help="Keep logs and timelines here."),
    hosts: str | None = typer.Option(
        None, help="All machines, a,b: run this on each. Or: testbed."
    ),
    node_rank: int = typer.Option(0, help="Which of the hosts this is."),
    master: str | None = typer.Option(None, help="host:port where they meet; on the first host."),
    port: int = typer.Option(0, help="Port to meet at on one machine; 0 takes any."),
    oversubscribe: bool = typer.Option(False, "--oversubscribe", help="Any number of workers."),
) -> None:
    """Train SCRIPT on several workers. Flags for the script itself come after `--`."""
    from shoal.runtime.launcher.options import LaunchOptions, parse_workers

    refuse_mistyped(context)
    command = [script, *context.args, *(context.obj or [])]
    options = LaunchOptions(
        workers=parse_workers(workers), backend=backend, output=output,
        strategy=strategy, resume=resume, checkpoint=checkpoint, max_restarts=max_restarts,
        timeout_seconds=timeout, directory=directory, hosts=split_hosts(hosts),
        node_rank=node_rank, master=master, port=port, oversubscribe=oversubscribe,
        after=lambda found: show_timeline(found, directory),
    )  # fmt: skip
    raise typer.Exit(start(command, options))


def start(command: list[str], options: LaunchOptions) -> int:
    """Check what can be checked here, then launch: here, or on each host of a testbed."""
    from shoal.runtime.launcher.launch import launch
    from shoal.runtime.launcher.options import check

    bed = testbed_named(options.hosts)
    if bed is not None:
        # its hosts check the rest, each where it is; here only what is the same on all of them
        options = replace(options, hosts=())
    check(command, options)  # what is cheap to refuse comes before torch is loaded
    if options.strategy is not None:
        ranks = options.workers * (len(bed.hosts) if bed else options.nodes)
        plan = read_strategy(options.strategy, ranks)
        death = plan.coordination.on_death  # what a worker's death means is the strategy's to say
        servers = plan.coordination.servers if ranks > 1 else 0  # one needs none
        options = replace(options, servers=servers, on_death=death)
    if bed is None:
        return launch(command, options)
    from shoal.testbed.launch import launch_on

    return launch_on(bed, command, options)


def testbed_named(hosts: tuple[str, ...]) -> TestbedPlan | None:
    """The testbed that --hosts names, if it does; see ``shoal testbed``."""
    from shoal.testbed.launch import find_testbed

    return find_testbed(hosts)


def refuse_mistyped(context: typer.Context) -> None:
    """An unknown option that looks like one of ours is a slip, not the script's."""
    known = [name for parameter in context.command.params for name in parameter.opts]
    for word in context.args:
        name = word.split("=")[0]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if name.startswith("--") and near:
            raise UsageError(
                f"unknown option {name}: did you mean {near[0]}? "
                "(options of the script itself come after --)"
            )


def split_hosts(text: str | None) -> tuple[str, ...]:
    """``a,b`` as typed."""
    return tuple(name.strip() for name in text.split(",")) if text else ()


def read_strategy(text: str, workers: int) -> Strategy:
    """The strategy, checked against the number of workers."""
    from shoal.rules import Facts
    from shoal.strategy import parse

    return parse(text).bind(Facts(ranks=workers))


def show_timeline(found: Path, directory: Path | None) -> None:
    """Say where the time went, and leave the pages where they can be opened."""
    if not any(found.glob("spans-*.jsonl")):
        return
    from rich.console import Console

    from shoal.timeline import collect, plain_table, rich_table, write_page, write_trace

    timeline = collect(found)
    target = directory or Path("shoal-runs", time.strftime("%Y%m%d-%H%M%S"))
    console = Console()
    if console.width >= TABLE_COLUMNS:
        console.print(rich_table(timeline.summary()))
    else:
        console.print(plain_table(timeline.summary()), soft_wrap=True, highlight=False)
    try:
        target.mkdir(parents=True, exist_ok=True)
        write_page(timeline, target / "timeline.html")
        write_trace(timeline, target / "timeline.json")
    except OSError as error:
        console.print(f"the timeline could not be kept in {target}: {error}", soft_wrap=True)
        return
    console.print(
        f"timeline: {target / 'timeline.html'} (a page); "
        f"{target / 'timeline.json'} (for ui.perfetto.dev)",
        soft_wrap=True,
    )
