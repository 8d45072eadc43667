"""Every error Shoal raises on purpose.

::

    ShoalError                      exit code 1
    ├── UsageError (ValueError)     exit code 2: the user typed or passed something wrong
    │   ├── UnknownName             no such technique; the nearest names are offered
    │   ├── BadArgument             an argument outside its range
    │   └── ConflictError           techniques that cannot be combined, all at once
    ├── CheckpointError             a checkpoint cannot be read or written
    │   ├── CheckpointMissing       none at this path; also a UsageError: exit code 2
    │   ├── CheckpointCorrupt       truncated, damaged, or not a checkpoint of Shoal
    │   └── CheckpointMismatch      of another model; also a UsageError: exit code 2
    └── FaultError                  a worker, a peer or the network failed
        ├── PeerLost                a rank died; names it
        ├── ExchangeTimeout         names the missing ranks and the exchange
        ├── LayoutMismatch          ranks disagree about model, optimizer or batch; exit code 2
        └── NonFinite               NaN or inf; names step and rank

A message names the value, says why it cannot work, and what to do instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class ShoalError(Exception):
    """Anything Shoal raises on purpose."""

    exit_code = 1


class UsageError(ShoalError, ValueError):
    """The user typed or passed something that cannot work."""

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
    """Techniques that cannot be combined: which, why, and what to do instead."""

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
    """There is no checkpoint at this path."""


class CheckpointCorrupt(CheckpointError):
    """The bytes on disk are not the bytes that were written."""


class CheckpointMismatch(CheckpointError, UsageError):
    """A sound checkpoint, but of another model."""


class FaultError(ShoalError):
    """A worker, a peer or the network failed."""


class PeerLost(FaultError):
    """A rank died while others needed it."""


class ExchangeTimeout(FaultError):
    """An exchange did not end in time; the message names the missing ranks."""


class LayoutMismatch(FaultError):
    """Ranks disagree about the model, the optimizer or the batch."""

    exit_code = 2  # caused by the script: starting it again would not help


class NonFinite(FaultError):
    """A loss or gradient is NaN or infinite; the message names step and rank."""
