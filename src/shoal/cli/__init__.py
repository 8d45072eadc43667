"""The ``shoal`` command: one file a subcommand; each loads torch only when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from shoal.errors import ShoalError, UnknownName

__all__ = ["main"]

INTERRUPTED = (130, 143)  # by SIGINT, SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; an error of ours is one message and its exit code, never a traceback."""
    from shoal.cli.app import COMMANDS, build

    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    given, for_script = words[:cut], words[cut + 1 :]
    try:
        if given and not given[0].startswith("-") and given[0] not in COMMANDS:
            raise UnknownName("command", given[0], COMMANDS)
        build().main(given, prog_name="shoal", obj=for_script)
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return error.exit_code
    except SystemExit as end:  # how typer ends: 0, what a command asked for, or 2
        code = end.code if isinstance(end.code, int) else 1
        if argv is None and code in INTERRUPTED:
            _leave_at_once(code)
        return code
    return 0


def _leave_at_once(code: int) -> None:
    """Everything is stopped and removed already: do not wait for torch to be taken down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
