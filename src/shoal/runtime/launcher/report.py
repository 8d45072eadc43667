"""Describe how the processes of a run ended, with the first failure in detail."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from shoal.runtime.launcher.processes import Worker
from shoal.runtime.world.failures import Failure, read_error_file

LOG_LINES = 40


@dataclass(frozen=True)
class WorkerExit:
    """How one worker ended."""

    worker: Worker
    failure: Failure | None  # from its error file, or None if it wrote no such file
    out_of_memory: bool = False  # the kernel probably killed it for lack of memory

    @classmethod
    def read(cls, worker: Worker, *, out_of_memory: bool) -> WorkerExit:
        """Read how a worker ended.

        ``out_of_memory`` tells whether an out-of-memory kill hit this cgroup since the start.
        """
        failure = read_error_file(worker.error_file)
        return cls(worker, failure, out_of_memory and worker.code == -signal.SIGKILL)

    @property
    def code(self) -> int:
        """The exit code, which is 128 + n if signal n ended the process.

        A code other than 1 in the error file is used instead.
        """
        if self.failure is not None and self.failure.exit_code != 1:
            return self.failure.exit_code
        code = self.worker.code or 0
        return code if code >= 0 else 128 - code

    @property
    def reason(self) -> str:
        """The exit code or the signal, in words."""
        code = self.worker.code or 0
        if code >= 0:
            return f"exit code {code}"
        name = signal_name(-code)
        if self.worker.stopped:
            return f"stopped by the launcher ({name})"
        if self.out_of_memory:
            return f"killed by the kernel because memory ran out ({name})"
        return f"killed by {name}"

    @property
    def order(self) -> tuple[bool, bool, float]:
        """A key that sorts causes, then consequences, then merely stopped workers, each by time."""
        secondary = self.failure is not None and self.failure.is_consequence
        seconds = self.failure.seconds if self.failure else self.worker.ended
        return self.worker.stopped and self.failure is None, secondary, seconds


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe(exits: Sequence[WorkerExit], log: Path | None) -> str:
    """Describe the first failure, with its traceback or the end of ``log``, then the others."""
    first, *others = sorted(exits, key=lambda ended: ended.order)
    lines = [f"{first.worker.name} failed first: {first.reason}"]
    if first.failure is not None:
        lines += [first.failure.traceback]
    elif log is not None and log.exists():
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        lines += [f"  | {line}" for line in tail]
    same = [other for other in others if first.failure and first.failure.same_reason(other.failure)]
    if same:
        lines.append(f"the same error on {', '.join(other.worker.name for other in same)}")
    for other in (other for other in others if other not in same):
        why = f" ({other.failure.type}: {other.failure.message})" if other.failure else ""
        lines.append(f"then {other.worker.name}: {other.reason}{why}")
    return "\n".join(lines)


def oom_kills() -> int:
    """Return how many processes of this control group died for lack of memory, or 0 if unknown."""
    counts = [0]
    for path in _memory_events():
        with suppress(OSError):
            words = path.read_text().split()
            counts += [int(n) for word, n in pairwise(words) if word == "oom_kill"]
    return max(counts)


def _memory_events() -> list[Path]:
    """Return the files that may count kills for lack of memory, in cgroup versions 2 and 1."""
    try:
        entries = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = []
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        inside = path.lstrip("/")
        if controllers == "":
            paths += [Path("/sys/fs/cgroup", inside, "memory.events")]
        elif controllers == "memory":
            root = Path("/sys/fs/cgroup/memory")
            paths += [root / inside / "memory.oom_control", root / "memory.oom_control"]
    return paths
