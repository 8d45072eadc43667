"""What goes into a checkpoint, and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import BadArgument

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Nested = dict[Any, Any]
"""Dicts, lists and tuples of tensors and of JSON scalars."""


@dataclass(frozen=True)
class State:
    """What one worker hands over to be saved.

    Attributes:
        shared: the same on every worker (model, optimizer); DTensors are saved shard by shard.
        mine: of this worker alone (residuals, replica, random state).
        meta: no tensors (strategy, loader position, versions); that of rank 0 is kept.
    """

    shared: Nested
    mine: Nested = field(default_factory=dict)
    meta: Nested = field(default_factory=dict)


@dataclass(frozen=True)
class SaveOptions:
    """How to save.

    Attributes:
        keep: how many checkpoints stay; older ones go after a save succeeded.
        group: whose workers save together; None for one process.
        timeout_seconds: how long a worker waits for the others in one phase.
    """

    keep: int = 3
    group: ProcessGroup | None = None
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise BadArgument(f"Options(keep={self.keep})", "at least 1 checkpoint must stay")
        if not self.timeout_seconds > 0:
            call = f"Options(timeout_seconds={self.timeout_seconds})"
            raise BadArgument(call, "must be positive")


@dataclass(frozen=True)
class Loaded:
    """What one worker gets back.

    Attributes:
        shared: tensors of the template if one was given, else whole tensors on the CPU.
        mine: this worker's own part, or None if the number of workers has changed.
        meta: as it was saved.
        step: at which step it was saved.
        path: from which directory.
        size: how many workers saved it.
        parts: the ``mine`` of any of these workers, read when asked for.
    """

    shared: Nested
    mine: Nested | None
    meta: Nested
    step: int
    path: Path
    size: int
    parts: Callable[[int], Nested]
