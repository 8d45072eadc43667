"""Records of testbeds: one file each under ``/run``, written before any namespace is made.

A record lists every namespace that may exist, whatever happened to the process that made them. A
record with an owner lasts as long as that process: once it is dead, the testbed is removed.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.testbed.plan import TestbedPlan, plan, show_rate

DIRECTORY = Path("/run")  # root only, and emptied by a reboot, as namespaces are
STEM = "shoal-testbed-"


@dataclass(frozen=True)
class TestbedRecord:
    """A testbed that exists, or is being made."""

    __test__ = False  # pytest: not a class of tests

    plan: TestbedPlan
    owner: str = ""  # process; empty: it stays until `shoal testbed down`

    @property
    def stale(self) -> bool:
        """Whether its owner ended without removing it."""
        return bool(self.owner) and self.owner != identity(int(self.owner.partition(" ")[0]))

    @property
    def path(self) -> Path:
        """Path of the file."""
        return DIRECTORY / f"{STEM}{self.plan.name}.json"

    def write(self, *, new: bool = False) -> None:
        """Write the file; ``new`` raises FileExistsError if it exists, so only one process can."""
        fields = {
            "name": self.plan.name,
            "hosts": len(self.plan.hosts),
            "rate": show_rate(self.plan.rate),
            "owner": self.owner,
        }
        draft = self.path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(fields))
        try:
            if new:
                os.link(draft, self.path)  # unlike a rename, refuses to replace
            else:
                draft.replace(self.path)
        finally:
            draft.unlink(missing_ok=True)


def identity(pid: int) -> str:
    """Return pid and start time, which distinguish a process from a later one with the same pid."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{pid} {fields[19]}"
    return ""


def find(name: str) -> TestbedRecord | None:
    """Return the record of that name, if there is one."""
    return _read(DIRECTORY / f"{STEM}{name}.json")


def records() -> tuple[TestbedRecord, ...]:
    """Return all records."""
    read = (_read(path) for path in sorted(DIRECTORY.glob(f"{STEM}*.json")))
    return tuple(record for record in read if record is not None)


def _read(path: Path) -> TestbedRecord | None:
    try:
        fields = json.loads(path.read_text())
        bed = plan(fields["hosts"], fields["rate"], fields["name"])
        return TestbedRecord(bed, str(fields["owner"]))
    except (OSError, ValueError, KeyError, TypeError):  # no file, or not a record
        return None
