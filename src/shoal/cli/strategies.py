"""``shoal strategies``: list the techniques of the six axes, each with a line and its paper."""

from __future__ import annotations

import json as jsonlib

import typer


def strategies(
    axis: str = typer.Argument("", metavar="[AXIS]", help="List only this axis."),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the six axes and all techniques of each."""
    from shoal.axes import AXES, QUESTIONS, catalogue
    from shoal.errors import UnknownName

    if axis and axis not in AXES:
        raise UnknownName("axis", axis, AXES)
    members = [member for member in catalogue() if axis in ("", member.axis)]
    if json:
        typer.echo(jsonlib.dumps([member._asdict() for member in members], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for name in dict.fromkeys(member.axis for member in members):
        table = Table(title=f"{name}: {QUESTIONS[name]}", title_justify="left", expand=True)
        table.add_column("technique", style="bold", no_wrap=True)
        table.add_column("what it does", ratio=3)
        table.add_column("paper", ratio=2, style="dim")
        for member in members:
            if member.axis == name:
                table.add_row(member.signature, member.summary.replace("``", "`"), member.paper)
        console.print(table)
