"""What a wire gives back at once: an answer that is still under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.flow import Ask


class Pending(Protocol):
    """An answer under way."""

    def wait(self) -> Any:
        """Block until it is there."""


class Wire(Protocol):
    """What carries asks to others and brings answers back.

    Asks are issued in the same order on every rank, always. ``blocks`` says that issuing waits for
    the network itself, so that who wants overlap must ask from another thread.
    """

    size: int
    blocks: bool

    def ask(self, ask: Ask) -> Pending:
        """Issue an ask."""

    def leave(self) -> None:
        """The run is over."""


class Ready(NamedTuple):
    """An answer that is there already."""

    answer: Any

    def wait(self) -> Any:
        """The answer."""
        return self.answer


class PendingWork(NamedTuple):
    """Torch works under way, and what to make of them when they end."""

    works: tuple[dist.Work, ...]
    finish: Callable[[], Any]
    signals: bool = True  # whether a work can say by itself that it ended; sends cannot

    def wait(self) -> Any:
        """Wait for each work, then finish."""
        for work in self.works:
            work.wait()
        return self.finish()


class PendingAll(NamedTuple):
    """Several answers under way, in the order of their asks."""

    parts: tuple[Pending, ...]

    def wait(self) -> tuple[Any, ...]:
        """All answers."""
        return tuple(part.wait() for part in self.parts)


gather_flat: Callable[..., dist.Work | None] = getattr(
    dist,
    "all_gather_single",
    dist.all_gather_into_tensor,  # its name before torch 2.13
)
ALIGN = 16  # bytes: the widest number is a complex128


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Put tensors into one buffer of bytes, each aligned for its own type."""
    pieces = []
    for part in parts:
        raw = part.detach().contiguous().view(-1).view(torch.uint8)
        pieces.append(raw)
        if gap := -raw.numel() % ALIGN:
            pieces.append(raw.new_zeros(gap))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def unpack(buffer: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Views of the tensors that :func:`pack` put there, shaped as ``like``."""
    parts, start = [], 0
    for tensor in like:
        nbytes = tensor.numel() * tensor.element_size()
        raw = buffer[start : start + nbytes]
        # nothing may lie anywhere, also where its type could not start
        part = raw.view(tensor.dtype) if nbytes else raw.new_empty(0, dtype=tensor.dtype)
        parts.append(part.view(tensor.shape))
        start += nbytes + (-nbytes % ALIGN)
    return tuple(parts)
