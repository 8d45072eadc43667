"""Residuals: what a compressor keeps from round to round, in memory that is allocated once.

A compressor must not change the state that it receives, for a step that is skipped goes back to it.
So a residual has two buffers, used in turns: each round reads one and writes the other one.

    round 0: reads A, writes B        round 1: reads B, writes A        round 2: reads A, ...

New memory every round would take longer than the sum itself: the system maps it page by page.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shoal.axes.compression.compressor import Value

_previous = WeakTensorKeyDictionary()
"""A residual -> the residual of the round before it, whose memory the next round overwrites."""


def one_residual(value: Value) -> tuple[Tensor]:
    """Return the state before the first round of a compressor that keeps one residual."""
    return (zeros(value.tensor),)


def zeros(tensor: Tensor) -> Tensor:
    """Return a residual for the first round: zeros, contiguous."""
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format)


def add_residual(tensor: Tensor, residual: Tensor, share: float = 1.0) -> Tensor:
    """Return ``tensor + share * residual``, contiguous, in the residual's other buffer."""
    return torch.add(tensor, residual, alpha=share, out=other_buffer(residual, tensor))


def other_buffer(state: Tensor, like: Tensor) -> Tensor:
    """Return contiguous memory for the successor of ``state``: that of its predecessor, if any."""
    buffer: Tensor | None = _previous.pop(state, None)  # type: ignore[no-untyped-call]
    if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
        buffer = torch.empty_like(like, memory_format=torch.contiguous_format)
    _previous[buffer] = state
    return buffer
