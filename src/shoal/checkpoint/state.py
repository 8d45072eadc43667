"""The input of :func:`shoal.checkpoint.save` and the output of :func:`shoal.checkpoint.load`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import BadArgument

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Nested = dict[Any, Any]
"""A dict whose values are tensors, numbers, strings, None, or nested dicts, lists and tuples."""


@dataclass(frozen=True)
class State:
    """The state that one worker passes to :func:`shoal.checkpoint.save`.

    Attributes:
        shared: state that is equal on all workers (model, optimizer). Of a DTensor, each worker
            passes its shard.
        mine: state that belongs to this worker only (residuals, replica, random state).
        meta: values without tensors (strategy, loader position); only those of rank 0 are saved.
    """

    shared: Nested
    mine: Nested = field(default_factory=dict)
    meta: Nested = field(default_factory=dict)


@dataclass(frozen=True)
class SaveOptions:
    """Options of :func:`shoal.checkpoint.save`.

    Attributes:
        keep: number of checkpoints to keep; older ones are deleted after a successful save.
        group: the workers that save together; None for a single process.
        timeout_seconds: how long a worker waits for the others in one exchange.
    """

    keep: int = 3
    group: ProcessGroup | None = None
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise BadArgument(f"SaveOptions(keep={self.keep})", "keep must be at least 1")
        if not self.timeout_seconds > 0:
            call = f"SaveOptions(timeout_seconds={self.timeout_seconds})"
            raise BadArgument(call, "timeout_seconds must be positive")


@dataclass(frozen=True)
class Loaded:
    """A loaded checkpoint, as seen by one worker.

    Attributes:
        shared: the shared state. Its tensors are those of ``into``. A tensor that ``into`` does not
            have, or has as a meta tensor, is new, not sharded, and on the CPU.
        mine: this worker's own state, or None if the number of workers has changed.
        meta: the values that rank 0 saved.
        step: the ``step`` that was passed to ``save``.
        path: the directory of the checkpoint.
        size: the number of workers that saved the checkpoint.
        parts: ``parts(rank)`` reads and returns the ``mine`` that worker ``rank`` saved.
    """

    shared: Nested
    mine: Nested | None
    meta: Nested
    step: int
    path: Path
    size: int
    parts: Callable[[int], Nested]
