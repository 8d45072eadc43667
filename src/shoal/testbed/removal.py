"""Remove namespaces and end the processes in them. Run as a script, this file is the guard.

The guard imports nothing of Shoal. Its standard input is a pipe whose other end only the owner of
the testbed has. If the pipe closes before the guard has read "bye", the owner is dead, and the
guard removes the testbed.
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
POLL_SECONDS = 0.05
NETNS = Path("/etc/netns")  # here ip looks for the /etc/hosts of a namespace


def remove(namespaces: Sequence[str], record: Path) -> None:
    """End the processes in the namespaces. Then delete namespaces, their files and the record."""
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
        _end(namespaces, number, seconds)
    for name in namespaces:
        _ip("netns", "delete", name)
        with suppress(OSError):
            (NETNS / name / "hosts").unlink()
        with suppress(OSError):
            (NETNS / name).rmdir()
    with suppress(OSError):
        NETNS.rmdir()  # fails if other namespaces have files there
    record.unlink(missing_ok=True)


def _end(namespaces: Sequence[str], number: int, seconds: float) -> None:
    for pid in _pids(namespaces):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    end = time.monotonic() + seconds
    while _pids(namespaces) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)


def _pids(namespaces: Iterable[str]) -> list[int]:
    """Return the pids of the processes in the namespaces, except this process."""
    listed = (_ip("netns", "pids", name).split() for name in namespaces)
    return [int(pid) for pids in listed for pid in pids if int(pid) != os.getpid()]


def _ip(*words: str) -> str:
    """Return the output of ``ip *words``, or an empty text if the command fails."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False).stdout


def main(words: Sequence[str]) -> None:
    """Wait until the owner writes "bye" or dies. If it died, remove the testbed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the owner handles signals and then ends the guard
    if sys.stdin.read() != "bye":
        remove(words[1:], Path(words[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
