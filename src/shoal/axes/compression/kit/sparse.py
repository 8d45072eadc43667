"""What sparsifiers share: a message of places and values, and what it says.

How to say in few bytes where entries belong.

Places are sorted, so most of a place is told by the one before. They are cut into blocks: a count
for each block, then the place inside its block for each entry. Unlike a list of gaps, this has the
same size for any places, so that all workers' messages are as long. One percent of the entries
takes 1.4 bytes a place, where a 32-bit number takes 4.

References:
    Elias, `Efficient storage and retrieval by content and address of static files
    <https://doi.org/10.1145/321812.321820>`_, 1974 (high bits counted, low bits told).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from shoal.errors import BadArgument
from shoal.flow import Ask, Gather
from shoal.notation import is_number

Parts = tuple[Tensor, ...]


def check_ratio(call: str, ratio: object) -> None:
    """Refuse what is no share of the entries."""
    if not (is_number(ratio) and 0 < ratio <= 1):
        why = f"ratio must lie in (0, 1], for example {call}(0.01)"
        raise BadArgument(f"{call}({ratio})", why)


def check_momentum(call: str, momentum: object) -> None:
    """Refuse what would grow for ever."""
    if not (is_number(momentum) and 0 <= momentum < 1):
        raise BadArgument(f"{call}(momentum={momentum})", "momentum must lie in [0, 1)")


def share(ratio: float, numel: int) -> int:
    """How many entries are sent: a share of them, and at least one if there is any."""
    return min(numel, max(1, int(ratio * numel)))


def flat(tensor: Tensor) -> Tensor:
    """All entries in one row; a view where that can be."""
    return tensor.reshape(-1)


def message(where: Tensor, values: Tensor, numel: int) -> Parts:
    """Entries as they travel."""
    return encode(where, numel), values


def places(parts: Parts, numel: int) -> Tensor:
    """Where the entries of a message belong."""
    return decode(parts[0], parts[1].numel(), numel)


def add(parts: Parts, into: Tensor, weight: float) -> None:
    """Add the entries sent to their places."""
    add_at(places(parts, into.numel()), parts[1], into, weight)


def add_at(where: Tensor, values: Tensor, into: Tensor, weight: float = 1.0) -> None:
    """Add values to the entries at these places, whatever the strides."""
    row = flat(into)
    row.index_add_(0, where, values.to(into.dtype), alpha=weight)
    if row.data_ptr() != into.data_ptr():
        into.copy_(row.view_as(into))


def spread(where: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """A tensor with these values at their places, and zero elsewhere."""
    whole = torch.zeros_like(like)
    add_at(where, values, whole)
    return whole


def send(
    where: Tensor, values: Tensor, like: Tensor
) -> Generator[Ask, Any, tuple[Tensor, Callable[[], Tensor]]]:
    """Ask for the mean of what all workers send; it, and how to find what I sent."""
    mean = yield Gather(message(where, values, like.numel()), add, like)  # places differ: no sum
    return mean, lambda: spread(where, values, like)


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
