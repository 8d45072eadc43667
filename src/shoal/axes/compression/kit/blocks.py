"""Process long tensors piece by piece, so that temporary results stay in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

PIECE = 65536  # numbers: 256 KiB as float32, half of a common second-level cache


def pieces(count: int, block: int = 1, *, size: int = PIECE) -> Iterator[slice]:
    """Yield slices of ``count`` numbers in order; each except the last holds whole blocks."""
    size = max(1, size // block) * block
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type to compute in: at least single precision."""
    return dtype if dtype == torch.float64 else torch.float32


def blocks(piece: Tensor, block: int) -> Tensor:
    """Return a flat piece as (blocks, block), in a type to compute in; zeros fill the last one."""
    if padding := -piece.numel() % block:
        piece = pad(piece, (0, padding))
    return piece.view(-1, block).to(compute_dtype(piece.dtype))


def block_range(piece: slice, block: int) -> slice:
    """Return the numbers of the blocks that a piece consists of."""
    return slice(piece.start // block, -(-piece.stop // block))


def factor(scale: Tensor, levels: int) -> Tensor:
    """Return ``levels / scale``, but finite for a scale of 0, so that zero stays zero."""
    return (levels / scale).clamp_(max=torch.finfo(scale.dtype).max)


def abs_max(flat: Tensor) -> Tensor:
    """Return the largest magnitude, (1,), in one pass; NaN if there is one."""
    if flat.numel() == 0:
        return flat.new_zeros(1)
    low, high = torch.aminmax(flat)
    return torch.maximum(-low, high).view(1)


def add_pieces(
    into: Tensor, weight: float, decode: Callable[[slice], Tensor], *, block: int = 1
) -> None:
    """Add ``weight * decode(piece)`` to each piece of ``into``, taken as flat."""
    whole = into.is_contiguous()
    flat = into.view(-1) if whole else into.new_zeros(into.numel())
    for piece in pieces(flat.numel(), block):
        flat[piece].add_(decode(piece), alpha=weight)
    if not whole:
        into.add_(flat.view(into.shape))
