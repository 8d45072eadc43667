"""The ``shoal`` command. Each subcommand is a module, which imports torch only when it runs."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from shoal.errors import ShoalError, UnknownName

__all__ = ["main"]

INTERRUPTED = (130, 143)  # exit codes after SIGINT and SIGTERM
# Name and summary of each command. The function of this name is in the module of this name.
COMMANDS = {
    "run": "Train a script on several workers.",
    "strategies": "List the six axes and all techniques of each.",
    "explain": "Explain in words what a strategy does in one step.",
    "doctor": "Check this machine, and say how to fix what is wrong.",
    "bench": "Measure Shoal against its peers.",
    "testbed": "Simulate a slow network of several hosts on this machine.",
}
FOR_THE_SCRIPT = {"allow_extra_args": True, "ignore_unknown_options": True}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A ShoalError is printed without a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    ours, for_script = words[:cut], words[cut + 1 :]
    try:
        if ours and not ours[0].startswith("-") and ours[0] not in COMMANDS:
            raise UnknownName("command", ours[0], COMMANDS)
        build().main(ours, prog_name="shoal", obj=for_script)
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return error.exit_code
    except SystemExit as end:  # typer always ends with SystemExit
        code = end.code if isinstance(end.code, int) else 1
        if argv is None and code in INTERRUPTED:
            # All workers have ended and temporary files are removed, so skip torch's slow exit.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code
    return 0


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
