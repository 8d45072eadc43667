"""Each testbed has a record, a file under ``/run`` that is written before any namespace is made.

A record tells which namespaces may exist, even after the process that made them has died. If a
record names an owner (a process), its testbed is removed once the owner has ended.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.testbed.plan import TestbedPlan, plan, show_rate

DIRECTORY = Path("/run")  # only root can write there. A reboot empties it and ends namespaces.
STEM = "shoal-testbed-"


@dataclass(frozen=True)
class TestbedRecord:
    """A testbed that exists, or is being made."""

    __test__ = False  # pytest: not a class of tests

    plan: TestbedPlan
    owner: str = ""  # identity of a process, or "" if the testbed has no owner

    @property
    def stale(self) -> bool:
        """Whether its owner has ended without removing the testbed."""
        return bool(self.owner) and self.owner != identity(int(self.owner.partition(" ")[0]))

    @property
    def path(self) -> Path:
        """The path of the record's file."""
        return DIRECTORY / f"{STEM}{self.plan.name}.json"

    def write(self, *, new: bool = False) -> None:
        """Write the file atomically. With ``new``, raise FileExistsError if the file exists."""
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
                os.link(draft, self.path)  # unlike a rename, this fails if the file exists
            else:
                draft.replace(self.path)
        finally:
            draft.unlink(missing_ok=True)


def identity(pid: int) -> str:
    """Return pid and start time as a unique text, or "" if there is no such process."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{pid} {fields[19]}"
    return ""


def find(name: str) -> TestbedRecord | None:
    """Return the record of the testbed of this name, or None."""
    return _read(DIRECTORY / f"{STEM}{name}.json")


def records() -> tuple[TestbedRecord, ...]:
    """Return the records of all testbeds, sorted by path."""
    read = (_read(path) for path in sorted(DIRECTORY.glob(f"{STEM}*.json")))
    return tuple(record for record in read if record is not None)


def _read(path: Path) -> TestbedRecord | None:
    try:
        fields = json.loads(path.read_text())
        bed = plan(fields["hosts"], fields["rate"], fields["name"])
        return TestbedRecord(bed, str(fields["owner"]))
    except (OSError, ValueError, KeyError, TypeError):  # no file, or not a record
        return None
