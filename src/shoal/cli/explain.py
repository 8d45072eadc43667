"""``shoal explain "<strategy>"``: describe in words what each worker does in one step."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict

import typer


def explain(
    strategy: str = typer.Argument(..., help="A strategy, as in shoal run --strategy."),
    workers: str = typer.Option("4", "-n", "--workers", help="The number of workers."),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Explain what a strategy does in one step, what it sends, and what to beware of."""
    from shoal.explain import explain as explain_strategy
    from shoal.runtime.launcher.options import parse_workers
    from shoal.strategy import parse

    explanation = explain_strategy(parse(strategy), parse_workers(workers))
    typer.echo(jsonlib.dumps(asdict(explanation), indent=2) if json else str(explanation))
