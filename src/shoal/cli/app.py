"""The commands of ``shoal``."""

from __future__ import annotations

import importlib
from typing import Any

import typer

# Name and summary. The module of the same name has a function of the same name.
COMMANDS = {
    "run": "Train a script on several workers.",
    "strategies": "List the six axes and all techniques of each.",
    "explain": "Explain in words what a strategy does in one step.",
    "doctor": "Check this machine, and say how to fix what is wrong.",
    "bench": "Measure Shoal against its peers.",
    "testbed": "Simulate a slow network of several hosts on this machine.",
}
FOR_THE_SCRIPT = {"allow_extra_args": True, "ignore_unknown_options": True}


def build() -> Any:
    """Build the click group of all commands."""
    app = typer.Typer(
        name="shoal",
        help="Train one model on many machines: every way to do it, described in one line.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_about)
    for name, summary in COMMANDS.items():
        function = getattr(importlib.import_module(f"shoal.cli.{name}"), name)
        settings = FOR_THE_SCRIPT if name == "run" else None
        app.command(name, short_help=summary, context_settings=settings)(function)
    return typer.main.get_command(app)


def _about(
    version: bool = typer.Option(False, "--version", help="Show the version and exit."),
) -> None:
    if version:
        from shoal import __version__

        typer.echo(f"shoal {__version__}")
        raise typer.Exit
