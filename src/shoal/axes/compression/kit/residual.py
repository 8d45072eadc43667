"""What is kept from round to round, and memory for it that is taken once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_spares = WeakTensorKeyDictionary()
"""A state's tensor -> the one of the round before, which is free once this one is gone on from."""


def plus(tensor: Tensor, residual: Tensor, share: float = 1.0) -> tuple[Tensor, Tensor]:
    """The tensor and a share of the residual, added up; shaped, and as one row.

    New memory every round would cost more than the sum, for the system hands it out page by page:
    see :func:`next_to`.
    """
    wanted = torch.add(tensor, residual, alpha=share, out=next_to(residual, tensor))
    return wanted, wanted.view(-1)


def next_to(state: Tensor, like: Tensor) -> Tensor:
    """Memory for what comes after a state: that of the one before it, which nobody needs."""
    made: Tensor | None = _spares.pop(state, None)  # type: ignore[no-untyped-call]
    if made is None or made.shape != like.shape or made.dtype != like.dtype:
        made = torch.empty_like(like, memory_format=torch.contiguous_format)
    _spares[made] = state
    return made


def zeros(tensor: Tensor) -> Tensor:
    """A residual before the first round."""
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format)
