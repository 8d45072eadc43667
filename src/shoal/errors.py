"""Every error Shoal raises on purpose.

::

    ShoalError                      exit code 1
    ├── UsageError (ValueError)     exit code 2: something the user typed or passed
    │   ├── UnknownName             no such technique; the nearest names are offered
    │   ├── BadArgument             an argument outside its range
    │   └── ConflictError           techniques that cannot be combined, all at once
    ├── CheckpointError             a checkpoint cannot be read or written
    │   ├── CheckpointMissing       none at the place named; a UsageError, too: exit code 2
    │   ├── CheckpointCorrupt       truncated, flipped, or not one of ours
    │   └── CheckpointMismatch      of another model; a UsageError, too: exit code 2
    └── FaultError                  a worker, a peer or the network
        ├── PeerLost                a rank died; names it
        ├── ExchangeTimeout         names who is missing, and in which exchange
        ├── LayoutMismatch          ranks disagree about model, optimizer or batch; exit code 2
        └── NonFinite               NaN or inf; names step and rank

A message names the value, says why it will not do, and what to do instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class ShoalError(Exception):
    """Anything Shoal raises on purpose."""

    exit_code = 1


class UsageError(ShoalError, ValueError):
    """Something the user typed or passed will not do."""

    exit_code = 2


class UnknownName(UsageError):
    """A name that no technique, suite or command has."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else f"one of: {', '.join(names)}"
        super().__init__(f"unknown {kind} {name!r}: {hint}")


class BadArgument(UsageError):
    """An argument outside its range."""

    def __init__(self, call: str, why: str) -> None:
        super().__init__(f"{call}: {why}")


class Conflict(NamedTuple):
    """One pair of answers that cannot stand together."""

    what: str
    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.what}: because {self.why}; instead: {self.instead}"


class ConflictError(UsageError):
    """Every conflict of a strategy, not only the first."""

    def __init__(self, conflicts: Sequence[Conflict]) -> None:
        self.conflicts = tuple(conflicts)
        count = len(self.conflicts)
        head = "cannot be combined:" if count == 1 else f"{count} conflicts:"
        super().__init__("\n  ".join([head, *map(str, self.conflicts)]))


class CheckpointError(ShoalError):
    """A checkpoint cannot be read or written."""


class CheckpointMissing(CheckpointError, UsageError):
    """There is no checkpoint at the place named."""


class CheckpointCorrupt(CheckpointError):
    """The bytes on disk are not those that were written."""


class CheckpointMismatch(CheckpointError, UsageError):
    """A sound checkpoint, but of another model."""


class FaultError(ShoalError):
    """A worker, a peer or the network failed."""


class PeerLost(FaultError):
    """A rank died while others needed it."""


class ExchangeTimeout(FaultError):
    """An exchange did not end in time; the message names who is missing."""


class LayoutMismatch(FaultError):
    """Ranks disagree about the model, the optimizer or the batch."""

    exit_code = 2  # the script's doing: starting it again would not help


class NonFinite(FaultError):
    """A loss or gradient is NaN or infinite; the message names step and rank."""
