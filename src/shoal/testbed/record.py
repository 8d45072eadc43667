"""What testbeds there are: a file each under ``/run``, written before anything is made.

Whoever finds a record knows every namespace that may exist, whatever became of the process that
made them. A record with an owner goes with that process: once it is dead, all is to be removed.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.testbed.plan import Plan, plan, show_rate

DIRECTORY = Path("/run")  # of root alone, and gone after a reboot, as namespaces are
STEM = "shoal-testbed-"


@dataclass(frozen=True)
class Record:
    """A testbed that was made, or was about to be."""

    plan: Plan
    owner: str = ""  # process it goes with; empty: it stays until it is taken down

    @property
    def stale(self) -> bool:
        """Whether its owner has gone without taking it down."""
        return bool(self.owner) and self.owner != identity(int(self.owner.partition(" ")[0]))

    @property
    def path(self) -> Path:
        """Where it is written."""
        return DIRECTORY / f"{STEM}{self.plan.name}.json"

    def write(self, *, new: bool = False) -> None:
        """Keep it; ``new`` fails with FileExistsError where there is one, so only one can win."""
        text = json.dumps({
            "name": self.plan.name, "hosts": len(self.plan.hosts),
            "rate": show_rate(self.plan.rate), "owner": self.owner,
        })  # fmt: skip
        draft = self.path.with_suffix(f".{os.getpid()}")
        draft.write_text(text)
        try:
            if new:
                os.link(draft, self.path)  # unlike a rename, refuses to replace
            else:
                draft.replace(self.path)
        finally:
            draft.unlink(missing_ok=True)


def identity(pid: int) -> str:
    """A process, told from a later one of the same number by when it began."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{pid} {fields[19]}"
    return ""


def find(name: str) -> Record | None:
    """The testbed of that name."""
    return _read(DIRECTORY / f"{STEM}{name}.json")


def records() -> tuple[Record, ...]:
    """Every testbed there is a record of."""
    found = (_read(path) for path in sorted(DIRECTORY.glob(f"{STEM}*.json")))
    return tuple(record for record in found if record is not None)


def _read(path: Path) -> Record | None:
    try:
        told = json.loads(path.read_text())
        return Record(plan(told["hosts"], told["rate"], told["name"]), str(told["owner"]))
    except (OSError, ValueError, KeyError, TypeError):  # none, or not one of ours
        return None
