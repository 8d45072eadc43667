"""Residuals: what a compressor did not send and keeps for later, in memory that is allocated once.

A compressor must not change the state that it receives, because after a skipped step this state is
used again. So a residual has two buffers: each round reads one of them and writes the other one.

    round 0: reads A, writes B        round 1: reads B, writes A        round 2: reads A, ...

Allocating new memory in every round would take longer than the addition.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shoal.axes.compression.compressor import Value

_previous = WeakTensorKeyDictionary()
"""Maps a residual to the residual of the previous round, whose memory the next round overwrites."""


def one_residual(value: Value) -> tuple[Tensor]:
    """Return the initial state of a compressor whose state is one residual."""
    return (zeros(value.tensor),)


def zeros(tensor: Tensor) -> Tensor:
    """Return the residual before the first round: contiguous zeros."""
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format)


def add_residual(tensor: Tensor, residual: Tensor, share: float = 1.0) -> Tensor:
    """Return ``tensor + share * residual``, contiguous, in the residual's other buffer."""
    return torch.add(tensor, residual, alpha=share, out=other_buffer(residual, tensor))


def other_buffer(state: Tensor, like: Tensor) -> Tensor:
    """Return contiguous memory for the next state.

    It is the memory of the state before ``state``, or new memory if that does not fit.
    """
    buffer: Tensor | None = _previous.pop(state, None)  # type: ignore[no-untyped-call]
    if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
        buffer = torch.empty_like(like, memory_format=torch.contiguous_format)
    _previous[buffer] = state
    return buffer
