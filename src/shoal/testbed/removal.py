"""Take namespaces away, with whoever still runs in them. Also a script: the guard.

As a script it imports nothing of Shoal. Its standard input is a pipe that only the testbed's owner
holds; when that closes without a farewell, the owner is dead, and what it made is removed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

GRACE_SECONDS = 2.0
LOOK_SECONDS = 0.05
NAMES = Path("/etc/netns")  # where ip looks for a namespace's own /etc/hosts


def remove(namespaces: Sequence[str], record: Path) -> None:
    """End what runs in the namespaces, delete them and their files, and last the record."""
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
        _end(namespaces, number, seconds)
    for name in namespaces:
        _ip("netns", "delete", name)
        with suppress(OSError):
            (NAMES / name / "hosts").unlink()
        with suppress(OSError):
            (NAMES / name).rmdir()
    with suppress(OSError):
        NAMES.rmdir()  # unless others have files there
    record.unlink(missing_ok=True)


def _end(namespaces: Sequence[str], number: int, seconds: float) -> None:
    for pid in _living(namespaces):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    end = time.monotonic() + seconds
    while _living(namespaces) and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)


def _living(namespaces: Iterable[str]) -> list[int]:
    """Who runs in the namespaces, without us and without those who have ended."""
    found = (_ip("netns", "pids", name).split() for name in namespaces)
    return [int(pid) for pids in found for pid in pids if int(pid) != os.getpid()]


def _ip(*words: str) -> str:
    """What ``ip`` says; nothing where there is no such namespace."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False).stdout


def main(words: Sequence[str]) -> None:
    """Wait for the owner's farewell, or for its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the owner
    if sys.stdin.read() != "bye":
        remove(words[1:], Path(words[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
