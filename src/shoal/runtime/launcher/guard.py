"""A small process that cleans up if the launcher itself is killed.

It runs as a script and imports neither shoal nor torch. Its standard input is a pipe that only the
launcher writes to. If the pipe closes before the line ``bye``, the launcher is dead. Then the guard
kills all process groups that the launcher started and removes the launcher's temporary directory.

The launcher writes these lines: ``+pid`` (a process group was started), ``-pid`` (it has ended),
``d path`` (a temporary directory) and ``bye`` (nothing is left to clean up).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress


def watch(lines: Iterable[str]) -> int:
    """Read the launcher's lines to the end, and clean up. Return the number of killed groups."""
    groups: set[int] = set()
    directories: list[str] = []
    for line in lines:
        text = line.rstrip("\n")
        if text == "bye":
            return 0
        if text.startswith("+"):
            groups.add(int(text[1:]))
        elif text.startswith("-"):
            groups.discard(int(text[1:]))
        elif text.startswith("d "):
            directories.append(text[2:])
    for group in groups:
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    return len(groups)


def main() -> None:
    """Ignore the signals that are meant for the launcher, and watch until its pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(sys.stdin)


if __name__ == "__main__":
    main()
