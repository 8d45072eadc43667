"""The workers that save or load together: what one learns, all learn.

Messages are JSON in byte tensors. torch's object collectives would pickle, and a pickle that came
over a socket runs code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shoal.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointMissing,
    ShoalError,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

_KINDS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind for kind in (CheckpointCorrupt, CheckpointMismatch, CheckpointMissing)
}


@dataclass(frozen=True)
class CheckpointGroup:
    """The workers of ``group``, or this process alone."""

    group: ProcessGroup | None = None
    timeout_seconds: float = 600.0

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        """How many they are."""
        return 1 if self.group is None else self.group.size()

    def gather(self, phase: str, value: Any) -> list[Any]:
        """Everyone's ``value``, by rank."""
        if self.group is None:
            return [value]
        message = json.dumps(value, allow_nan=False).encode()
        try:
            return [json.loads(m) for m in self._gather_bytes(message)]
        except RuntimeError as error:
            where = f"rank {self.rank} of {self.size} lost the others in phase {phase!r}"
            raise CheckpointError(f"{where} of a checkpoint: {error}") from error

    def together(self, phase: str, action: Callable[[], T]) -> list[T]:
        """Do ``action`` on every worker; return everyone's result, or raise on all if one fails."""
        value, own = attempt(action)
        told = None if own is None else [type(own).__name__, str(own)]
        answers = self.gather(phase, {"value": value, "error": told})
        errors = {r: a["error"] for r, a in enumerate(answers) if a["error"] is not None}
        if own is not None and (self.size == 1 or not isinstance(own, CheckpointError)):
            raise own
        if errors:
            rank, (kind, text) = next(iter(errors.items()))
            prefix = f"rank {rank}: " if self.size > 1 else ""
            raise _KINDS.get(kind, CheckpointError)(prefix + text) from own
        return [answer["value"] for answer in answers]

    def _gather_bytes(self, message: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        lengths = [int(n) for n in self._all_gather(torch.tensor([len(message)]))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(message)] = mine
        rows = self._all_gather(padded)
        return [row[:n].numpy().tobytes() for row, n in zip(rows, lengths, strict=True)]

    def _all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        import torch.distributed as dist

        if dist.get_backend(self.group) == "nccl":
            row = row.cuda()
        rows = [torch.empty_like(row) for _ in range(self.size)]
        work = dist.all_gather(rows, row, group=self.group, async_op=True)
        work.wait(timedelta(seconds=self.timeout_seconds))
        return [r.cpu() for r in rows]


def attempt(action: Callable[[], T]) -> tuple[T | None, ShoalError | None]:
    """The result of ``action``, or the error it ended in, as one of ours."""
    try:
        return action(), None
    except ShoalError as error:
        return None, error
    except Exception as error:  # a bug on one worker must not leave the others waiting
        wrapped = CheckpointError(f"{type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return None, wrapped
