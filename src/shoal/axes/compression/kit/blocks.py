"""Process long tensors in pieces, so that temporary tensors stay in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

PIECE = 65536  # numbers per piece: 256 KiB in float32, half of a common second-level cache


def pieces(count: int, block: int = 1, *, size: int = PIECE) -> Iterator[slice]:
    """Yield slices that divide ``count`` numbers into pieces of whole blocks (except the last)."""
    size = max(1, size // block) * block
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to compute with numbers of ``dtype``: float64 or float32."""
    return dtype if dtype == torch.float64 else torch.float32


def blocks(piece: Tensor, block: int) -> Tensor:
    """Return a flat piece as (blocks, block), in its compute dtype; zeros fill the last block."""
    if padding := -piece.numel() % block:
        piece = pad(piece, (0, padding))
    return piece.view(-1, block).to(wide(piece.dtype))


def block_range(piece: slice, block: int) -> slice:
    """Return the range of block indices that a piece covers."""
    return slice(piece.start // block, -(-piece.stop // block))


def factor(scale: Tensor, levels: int) -> Tensor:
    """Return ``levels / scale``, but a finite number if the scale is 0, so that 0 * factor is 0."""
    return (levels / scale).clamp_(max=torch.finfo(scale.dtype).max)


def abs_max(flat: Tensor) -> Tensor:
    """Return the largest magnitude, (1,), in one pass; NaN if the tensor contains NaN."""
    if flat.numel() == 0:
        return flat.new_zeros(1)
    low, high = torch.aminmax(flat)
    return torch.maximum(-low, high).view(1)


def add_pieces(
    into: Tensor, weight: float, decode: Callable[[slice], Tensor], *, block: int = 1
) -> None:
    """Add ``weight * decode(piece)`` to each piece of the flattened ``into``, in place."""
    contiguous = into.is_contiguous()
    flat = into.view(-1) if contiguous else into.new_zeros(into.numel())
    for piece in pieces(flat.numel(), block):
        flat[piece].add_(decode(piece), alpha=weight)
    if not contiguous:
        into.add_(flat.view(into.shape))
