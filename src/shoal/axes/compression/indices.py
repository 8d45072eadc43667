"""How to say in few bytes where entries belong.

Places are sorted, so most of a place is told by the one before. They are cut into blocks: a count
for each block, then the place inside its block for each entry. Unlike a list of gaps, this has the
same size for any places, so that all workers' messages are as long. One percent of the entries
takes 1.4 bytes a place, where a 32-bit number takes 4.

References:
    Elias, `Efficient storage and retrieval by content and address of static files
    <https://doi.org/10.1145/321812.321820>`_, 1974 (high bits counted, low bits told).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCKS = {1: 2**8 - 1, 2: 2**16 - 1}  # bytes a place -> entries a block, whose count fits as well
LOWEST = 2**15  # subtracted from 16-bit numbers, for few wires know unsigned ones


def encode(where: Tensor, numel: int) -> Tensor:
    """Ascending places among ``numel`` as bytes, of a number that ``code_nbytes`` tells."""
    width = _width(where.numel(), numel)
    if width not in BLOCKS:
        return where.to(torch.int32 if width == 4 else torch.int64).view(torch.uint8)
    block = BLOCKS[width]
    high = torch.div(where, block, rounding_mode="floor")
    counts = torch.bincount(high, minlength=-(-numel // block))
    numbers = torch.cat([counts, where - high * block])
    if width == 1:
        return numbers.to(torch.uint8)
    return (numbers - LOWEST).to(torch.int16).view(torch.uint8)


def decode(code: Tensor, k: int, numel: int) -> Tensor:
    """The k places that :func:`encode` told."""
    width = _width(k, numel)
    if width not in BLOCKS:
        return _aligned(code, width).view(torch.int32 if width == 4 else torch.int64).long()
    block = BLOCKS[width]
    numbers = code.long()
    if width == 2:
        numbers = _aligned(code, width).view(torch.int16).long() + LOWEST
    blocks = -(-numel // block)
    starts = torch.arange(0, blocks * block, block, device=code.device)
    return starts.repeat_interleave(numbers[:blocks], output_size=k) + numbers[blocks:]


def code_nbytes(k: int, numel: int) -> int:
    """How many bytes k places among ``numel`` take."""
    width = _width(k, numel)
    return width * (k + (-(-numel // BLOCKS[width]) if width in BLOCKS else 0))


def _width(k: int, numel: int) -> int:
    """Bytes a place, by which the whole is shortest."""
    plain = 4 if numel <= 2**31 else 8
    sizes = {width: width * (k + -(-numel // block)) for width, block in BLOCKS.items()}
    sizes[plain] = plain * k
    return min(sizes, key=lambda width: (sizes[width], -width))  # plain ones are read fastest


def _aligned(code: Tensor, width: int) -> Tensor:
    return code if code.data_ptr() % width == 0 and code.is_contiguous() else code.clone()
