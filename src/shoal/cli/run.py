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

TABLE_COLUMNS = 120


def run(
    context: typer.Context,
    script: str = typer.Argument(..., help="The training script."),
    workers: str = typer.Option("1", "-n", "--workers", help="Workers on this machine."),
    strategy: str | None = typer.Option(None, "--strategy", "-s", help="How to train, in a line."),
    backend: str | None = typer.Option(None, help="gloo, nccl or shoal; see the docs."),
    output: str = typer.Option("main", help="main: of rank 0; all: of all ranks, prefixed."),
    resume: bool = typer.Option(False, "--resume", help="Resume from the last checkpoint."),
    checkpoint: Path | None = typer.Option(None, help="The directory of the checkpoints."),
    max_restarts: int = typer.Option(0, help="How often to restart after a failure."),
    timeout: float | None = typer.Option(None, help="How many seconds an exchange may take."),
    directory: Path | None = typer.Option(None, "--dir", help="Keep logs and timelines here."),
    hosts: str | None = typer.Option(None, help="All hosts, a,b (run this on each), or testbed."),
    node_rank: int = typer.Option(0, help="The index of this machine in --hosts."),
    master: str | None = typer.Option(None, help="host:port of the store, on the first host."),
    port: int = typer.Option(0, help="The port of the store, on one machine; 0: any."),
    oversubscribe: bool = typer.Option(False, "--oversubscribe", help="Any number of workers."),
) -> None:
    """Train SCRIPT on several workers. Flags for the script itself come after `--`."""
    from shoal.runtime.launcher.options import LaunchOptions, parse_workers

    refuse_mistyped(context)
    command = [script, *context.args, *(context.obj or [])]
    options = LaunchOptions(
        workers=parse_workers(workers), backend=backend, output=output,
        strategy=strategy, resume=resume, checkpoint=checkpoint, max_restarts=max_restarts,
        timeout_seconds=timeout, directory=directory,
        hosts=tuple(name.strip() for name in hosts.split(",")) if hosts else (),
        node_rank=node_rank, master=master, port=port, oversubscribe=oversubscribe,
        after=lambda run_directory: show_timeline(run_directory, directory),
    )  # fmt: skip
    raise typer.Exit(start(command, options))


def start(command: list[str], options: LaunchOptions) -> int:
    """Check the options, then launch on this machine or on each host of a testbed."""
    from shoal.runtime.launcher.launch import launch
    from shoal.runtime.launcher.options import check
    from shoal.testbed.launch import find_testbed, launch_on

    bed = find_testbed(options.hosts)
    if bed is not None:
        # Each host of the testbed checks its own --hosts options.
        options = replace(options, hosts=())
    check(command, options)  # done before torch is imported, so that a wrong option fails at once
    if options.strategy is not None:
        from shoal.rules import Facts
        from shoal.strategy import parse

        ranks = options.workers * (len(bed.hosts) if bed else options.nodes)
        plan = parse(options.strategy).bind(Facts(ranks=ranks))
        death = plan.coordination.on_death  # what to do when a worker dies
        servers = plan.coordination.servers if ranks > 1 else 0  # a single worker needs no server
        options = replace(options, servers=servers, on_death=death)
    return launch(command, options) if bed is None else launch_on(bed, command, options)


def refuse_mistyped(context: typer.Context) -> None:
    """Raise if an unknown option resembles an option of ``shoal run`` and may be mistyped."""
    known = [name for parameter in context.command.params for name in parameter.opts]
    for word in context.args:
        name = word.split("=")[0]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if name.startswith("--") and near:
            raise UsageError(
                f"unknown option {name}: did you mean {near[0]}? "
                "(options of the script itself come after --)"
            )


def show_timeline(run_directory: Path, directory: Path | None) -> None:
    """Print how the run spent its time, and write the timeline's files into ``directory``.

    ``run_directory`` has the spans of this machine's workers. Without spans nothing is done. If
    ``directory`` is None, a new directory below ``shoal-runs`` is used.
    """
    if not any(run_directory.glob("spans-*.jsonl")):
        return
    from rich.console import Console

    from shoal.timeline import collect, plain_table, rich_table, write_page, write_trace

    timeline = collect(run_directory)
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
        console.print(f"the timeline could not be written to {target}: {error}", soft_wrap=True)
        return
    console.print(
        f"timeline: {target / 'timeline.html'} (a page); "
        f"{target / 'timeline.json'} (for ui.perfetto.dev)",
        soft_wrap=True,
    )
