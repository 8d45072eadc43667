"""Long tensors, a piece at a time: what a piece takes in between stays in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

PIECE = 65536  # numbers: 256 KiB as float32, half of a common second-level cache


def pieces(count: int, block: int = 1, *, size: int = PIECE) -> Iterator[slice]:
    """Slices of so many numbers, in order; each but the last holds whole blocks."""
    size = max(1, size // block) * block
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in: single precision at least."""
    return dtype if dtype == torch.float64 else torch.float32


def blocks(piece: Tensor, block: int) -> Tensor:
    """A flat piece as (blocks, block), in a type to compute in; zeros fill up the last one."""
    if gap := -piece.numel() % block:
        piece = pad(piece, (0, gap))
    return piece.view(-1, block).to(wide(piece.dtype))


def of_blocks(piece: slice, block: int) -> slice:
    """Which blocks a piece is made of."""
    return slice(piece.start // block, -(-piece.stop // block))


def factor(scale: Tensor, levels: int) -> Tensor:
    """What takes ``scale`` to ``levels``; finite even for no scale, so that zero stays zero."""
    return (levels / scale).clamp_(max=torch.finfo(scale.dtype).max)


def add_pieces(
    into: Tensor, weight: float, decode: Callable[[slice], Tensor], *, block: int = 1
) -> None:
    """Add to ``into`` what ``decode`` says of each piece of it, taken flat, times ``weight``."""
    whole = into.is_contiguous()
    flat = into.view(-1) if whole else into.new_zeros(into.numel())
    for piece in pieces(flat.numel(), block):
        flat[piece].add_(decode(piece), alpha=weight)
    if not whole:
        into.add_(flat.view(into.shape))
