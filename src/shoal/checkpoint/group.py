"""The group of ranks that save or load together: if one of them fails, all of them raise.

Ranks exchange JSON in byte tensors. torch's object collectives would use pickle, and unpickling
data from a socket can run code.
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

_ERROR_TYPES: dict[str, type[CheckpointError]] = {
    kind.__name__: kind for kind in (CheckpointCorrupt, CheckpointMismatch, CheckpointMissing)
}


@dataclass(frozen=True)
class CheckpointGroup:
    """The ranks of ``group``, or only this process if ``group`` is None.

    An exchange that takes longer than ``timeout_seconds`` fails.
    """

    group: ProcessGroup | None = None
    timeout_seconds: float = 600.0

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return 1 if self.group is None else self.group.size()

    def run(self, phase: str, action: Callable[[], T]) -> T:
        """Call ``action`` and return its result; if it fails on any rank, raise on all ranks.

        All ranks must call this together. ``phase`` names the call in error messages.
        """
        value, error = _attempt(action)
        self._gather_results(phase, None, error)
        return value  # type: ignore[return-value]  # without an error there is a value

    def gather(self, phase: str, action: Callable[[], T]) -> list[T]:
        """Like :meth:`run`, but return the results (JSON values) of all ranks, in rank order."""
        value, error = _attempt(action)
        return self._gather_results(phase, value, error)

    def _gather_results(self, phase: str, value: Any, error: ShoalError | None) -> list[Any]:
        report = None if error is None else [type(error).__name__, str(error)]
        answers = self._gather_json(phase, {"value": value, "error": report})
        if error is not None and (self.size == 1 or not isinstance(error, CheckpointError)):
            raise error
        for rank, answer in enumerate(answers):
            if answer["error"] is not None:
                kind, text = answer["error"]
                prefix = f"rank {rank}: " if self.size > 1 else ""
                raise _ERROR_TYPES.get(kind, CheckpointError)(prefix + text) from error
        return [answer["value"] for answer in answers]

    def _gather_json(self, phase: str, value: Any) -> list[Any]:
        if self.group is None:
            return [value]
        message = bytearray(json.dumps(value, allow_nan=False).encode())
        try:
            lengths = [int(n) for n in self._all_gather(torch.tensor([len(message)]))]
            padded = torch.zeros(max(lengths), dtype=torch.uint8)
            padded[: len(message)] = torch.frombuffer(message, dtype=torch.uint8)
            rows = self._all_gather(padded)
        except RuntimeError as error:
            text = f"rank {self.rank} of {self.size} lost the other ranks in phase {phase!r}"
            raise CheckpointError(f"{text} of a checkpoint: {error}") from error
        return [json.loads(r[:n].numpy().tobytes()) for r, n in zip(rows, lengths, strict=True)]

    def _all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        import torch.distributed as dist

        if dist.get_backend(self.group) == "nccl":
            row = row.cuda()
        rows = [torch.empty_like(row) for _ in range(self.size)]
        work = dist.all_gather(rows, row, group=self.group, async_op=True)
        work.wait(timedelta(seconds=self.timeout_seconds))
        return [r.cpu() for r in rows]


def _attempt(action: Callable[[], T]) -> tuple[T | None, ShoalError | None]:
    """Return (result of ``action``, None), or (None, its error as a :class:`ShoalError`)."""
    try:
        return action(), None
    except ShoalError as error:
        return None, error
    except Exception as error:  # other ranks wait for this rank's answer, so send the error
        wrapped = CheckpointError(f"{type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return None, wrapped
