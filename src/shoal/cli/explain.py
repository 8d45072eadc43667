"""``shoal explain "<strategy>"``: what each worker does in one step, in words."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict

import typer


def explain(
    strategy: str = typer.Argument(..., help="As given to shoal run --strategy."),
    workers: str = typer.Option("4", "-n", "--workers", help="For how many workers."),
    json: bool = typer.Option(False, "--json", help="For programs."),
) -> None:
    """Say in words what a strategy does in one step, what is sent, and what speaks against it."""
    from shoal.explain import explain as explained
    from shoal.runtime.launcher.options import parse_workers
    from shoal.strategy import parse

    made = explained(parse(strategy), parse_workers(workers))
    typer.echo(jsonlib.dumps(asdict(made), indent=2) if json else str(made))
