"""The ``shoal`` command: one module for each subcommand; torch is imported only when one runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from shoal.errors import ShoalError, UnknownName

__all__ = ["main"]

INTERRUPTED = (130, 143)  # by SIGINT, SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. An error of Shoal prints a message, no traceback."""
    from shoal.cli.app import COMMANDS, build

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
    except SystemExit as end:  # typer always ends with one
        code = end.code if isinstance(end.code, int) else 1
        if argv is None and code in INTERRUPTED:
            # All processes are stopped and all files removed: do not wait for torch to unload.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code
    return 0
