"""Say what went wrong: who failed first, with its traceback, exit code or signal."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.runtime.launcher.processes import Worker
from shoal.runtime.world.failures import Failure, read_error_file

LOG_LINES = 40


@dataclass(frozen=True)
class Death:
    """How one worker ended, as far as it can be told from outside."""

    worker: Worker
    told: Failure | None  # what it wrote itself, if it could
    out_of_memory: bool = False

    @property
    def code(self) -> int:
        """The exit code to hand on: 128 + n for signal n, as shells do."""
        if self.told is not None and self.told.exit_code != 1:
            return self.told.exit_code
        code = self.worker.code or 0
        return code if code >= 0 else 128 - code

    @property
    def how(self) -> str:
        """In words."""
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
        """Causes before consequences before those the launcher stopped, then by time."""
        secondary = self.told is not None and self.told.is_consequence
        when = self.told.seconds if self.told else self.worker.ended
        return self.worker.stopped and self.told is None, secondary, when


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_death(worker: Worker, *, out_of_memory: bool) -> Death:
    """Put together what the worker said and how it ended."""
    told = read_error_file(worker.error_file)
    return Death(worker, told, out_of_memory=out_of_memory and worker.code == -signal.SIGKILL)


def describe(deaths: Sequence[Death], log: Path | None) -> str:
    """The first failure in full, the others in a line each, those that say the same in one."""
    first, *others = sorted(deaths, key=lambda death: death.order)
    lines = [f"{first.worker.name} failed first: {first.how}"]
    if first.told is not None:
        lines += [first.told.traceback]
    elif log is not None and log.exists():
        lines += tail(log)
    same = [death for death in others if first.told and first.told.says_as(death.told)]
    if same:
        names = ", ".join(death.worker.name for death in same)
        lines.append(f"the same on {names}")
    for death in (death for death in others if death not in same):
        why = f" ({death.told.type}: {death.told.message})" if death.told else ""
        lines.append(f"then {death.worker.name}: {death.how}{why}")
    return "\n".join(lines)


def tail(log: Path) -> list[str]:
    """The end of a silent worker's output."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [f"  | {line}" for line in lines[-LOG_LINES:]]


def oom_kills() -> int:
    """How many processes of this control group the kernel has killed for lack of memory."""
    count = 0
    for path in _memory_events():
        try:
            words = path.read_text().split()
        except OSError:
            continue
        pairs = dict(zip(words[::2], words[1::2], strict=False))
        count = max(count, int(pairs.get("oom_kill", 0)))
    return count


def _memory_events() -> list[Path]:
    try:
        entries = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for entry in entries:
        _, kinds, path = entry.split(":", 2)
        inside = path.lstrip("/")
        if kinds == "":
            found += [Path("/sys/fs/cgroup", inside, "memory.events")]
        elif kinds == "memory":
            root = Path("/sys/fs/cgroup/memory")
            found += [root / inside / "memory.oom_control", root / "memory.oom_control"]
    return found
