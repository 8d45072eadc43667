"""The exceptions that Shoal raises on purpose.

::

    ShoalError                      exit code 1
    ├── UsageError (ValueError)     exit code 2: the user typed or passed something wrong
    │   ├── UnknownName             nothing has this name; the message suggests other names
    │   ├── BadArgument             an argument has a wrong type or is out of range
    │   └── ConflictError           techniques cannot be combined; the message lists all conflicts
    ├── CheckpointError             a checkpoint cannot be read or written
    │   ├── CheckpointMissing       exit code 2: there is no checkpoint at this path
    │   ├── CheckpointCorrupt       the files are truncated, damaged, or not written by Shoal
    │   └── CheckpointMismatch      exit code 2: it was saved from another model
    └── FaultError                  a worker, a peer or the network failed
        ├── PeerLost                a rank died; the message names it
        ├── ExchangeTimeout         the message names the exchange and the missing ranks
        ├── LayoutMismatch          exit code 2: ranks disagree about model, optimizer or batch
        └── NonFinite               a NaN or inf; the message names the step and the rank

The message of a UsageError says what is wrong, why it cannot work, and what to do instead.
CheckpointMissing and CheckpointMismatch are UsageErrors, too.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class ShoalError(Exception):
    """The base class of all exceptions that Shoal raises on purpose."""

    exit_code = 1


class UsageError(ShoalError, ValueError):
    """The user typed or passed something that cannot work."""

    exit_code = 2


class UnknownName(UsageError):
    """There is no technique, suite, command, ... (``kind``) with this name."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        similar = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        ask, choose = f"did you mean {', '.join(similar)}?", f"choose one of: {', '.join(names)}"
        hint = ask if similar else choose
        super().__init__(f"unknown {kind} {name!r}: {hint}")


class BadArgument(UsageError):
    """An argument has a wrong type or is out of range; ``call`` is the call as text."""

    def __init__(self, call: str, why: str) -> None:
        super().__init__(f"{call}: {why}")


class Conflict(NamedTuple):
    """A combination that does not work (``what``), the reason, and what to do instead."""

    what: str
    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.what}: because {self.why}; instead: {self.instead}"


class ConflictError(UsageError):
    """The techniques of a strategy cannot be combined; the message lists all conflicts."""

    def __init__(self, conflicts: Sequence[Conflict]) -> None:
        self.conflicts = tuple(conflicts)
        count = len(self.conflicts)
        head = "cannot be combined:" if count == 1 else f"{count} conflicts:"
        super().__init__("\n  ".join([head, *map(str, self.conflicts)]))


class CheckpointError(ShoalError):
    """A checkpoint cannot be read or written."""


class CheckpointMissing(CheckpointError, UsageError):
    """There is no checkpoint at this path."""


class CheckpointCorrupt(CheckpointError):
    """The files are truncated, damaged, or not a checkpoint that Shoal wrote."""


class CheckpointMismatch(CheckpointError, UsageError):
    """The checkpoint is intact, but it was saved from another model."""


class FaultError(ShoalError):
    """A worker, a peer or the network failed."""


class PeerLost(FaultError):
    """A rank died while another rank waited for it."""


class ExchangeTimeout(FaultError):
    """An exchange did not end before its timeout; the message names the missing ranks."""


class LayoutMismatch(FaultError):
    """Ranks disagree about the model, the optimizer or the batch."""

    exit_code = 2  # the script causes this error, so a restart would not help


class NonFinite(FaultError):
    """A loss or gradient is NaN or infinite; the message names the step and the rank."""
