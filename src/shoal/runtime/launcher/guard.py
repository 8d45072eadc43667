"""A small process that cleans up when the launcher itself is killed.

Run as a script, without shoal or torch. Its standard input is a pipe that only the launcher holds:
when it closes without a farewell, the launcher is dead, and every process group it had started is
killed and its temporary directory removed. Lines: ``+pid``, ``-pid``, ``d path``, ``bye``.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterable


def watch(lines: Iterable[str]) -> int:
    """Follow the launcher; return how many groups had to be killed."""
    groups: set[int] = set()
    directories: list[str] = []
    for line in lines:
        word = line.rstrip("\n")
        if word == "bye":
            return 0
        if word.startswith("+"):
            groups.add(int(word[1:]))
        elif word.startswith("-"):
            groups.discard(int(word[1:]))
        elif word.startswith("d "):
            directories.append(word[2:])
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            continue
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    return len(groups)


def main() -> None:
    """Ignore what is meant for the launcher, and follow it to the end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(sys.stdin)


if __name__ == "__main__":
    main()
