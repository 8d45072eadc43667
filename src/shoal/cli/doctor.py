"""``shoal doctor``: check this machine, and say how to fix what is wrong."""

from __future__ import annotations

import json as jsonlib

import typer

MARKS = {"ok": "[green]ok[/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]fail[/red]"}


def doctor(
    workers: str = typer.Option("2", "-n", "--workers", help="Check for this many workers."),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Check this machine, and say how to fix what is wrong. Exit code 1: a check failed."""
    from shoal.cli.checks import examine
    from shoal.errors import UsageError
    from shoal.runtime.launcher.options import parse_workers

    count = parse_workers(workers)
    if count < 1:
        raise UsageError(f"-n {count}: at least one worker is needed")
    findings = examine(count)
    code = int(any(finding.status == "fail" for finding in findings))
    if json:
        report = [
            {"name": each.name, "status": each.status, "found": each.fact, "fix": each.fix}
            for each in findings
        ]
        typer.echo(jsonlib.dumps(report, indent=2))
        raise typer.Exit(code)
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        fix = f"\n[yellow]-> {finding.fix}[/yellow]" if finding.fix else ""
        table.add_row(MARKS[finding.status], f"[bold]{finding.name}[/bold]", finding.fact + fix)
    Console().print(table)
    raise typer.Exit(code)
