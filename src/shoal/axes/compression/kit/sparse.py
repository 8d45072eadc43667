"""Sparse messages: values, and a short code of the indices where they belong.

Indices are sorted, so most digits of an index repeat those of the one before. They are cut into
blocks: first the number of entries in each block, then each entry's offset inside its block. Unlike
a list of gaps, this code has the same size for any k indices, so all workers' messages are equally
long. If one percent of the entries is sent, an index takes 1.4 bytes instead of 4.

References:
    Elias, `Efficient storage and retrieval by content and address of static files
    <https://doi.org/10.1145/321812.321820>`_, 1974 (high bits counted, low bits stored).
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.errors import BadArgument
from shoal.flow import Ask, Gather, Sent
from shoal.notation import is_number

Parts = tuple[Tensor, ...]
BLOCKS = {1: 2**8 - 1, 2: 2**16 - 1}  # bytes per number -> block size, which a count must fit, too
LOWEST = 2**15  # subtracted from 16-bit numbers, because few backends send unsigned ones


def check_ratio(call: str, ratio: object) -> None:
    """Raise unless ``ratio`` is a share of the entries."""
    if not (is_number(ratio) and 0 < ratio <= 1):
        why = f"ratio must lie in (0, 1], for example {call}(0.01)"
        raise BadArgument(f"{call}({ratio})", why)


def share(ratio: float, numel: int) -> int:
    """Return how many entries to send: ``ratio`` of them, and at least one if there is any."""
    return min(numel, max(1, int(ratio * numel)))


class SparseSent(NamedTuple):
    """What was sent: ``values`` at the indices ``where``, zero elsewhere, shaped like ``like``."""

    where: Tensor
    values: Tensor
    like: Tensor

    def dense(self) -> Tensor:
        """Return it with zeros filled in."""
        return to_dense(self.where, self.values, self.like)

    def subtract_from(self, tensor: Tensor) -> None:
        """Subtract only the entries that were sent; inf and NaN were sent, so zero remains."""
        row = tensor.view(-1)
        rest = row[self.where].sub_(self.values)
        row[self.where] = rest.nan_to_num_(0.0, math.inf, -math.inf)


def send(where: Tensor, values: Tensor, like: Tensor) -> Generator[Ask, Any, tuple[Tensor, Sent]]:
    """Send entries; return the mean over all workers, and what this worker sent."""
    # Workers send different entries, so their messages cannot be summed: gather.
    mean = yield Gather(message(where, values, like.numel()), add, like)
    return mean, SparseSent(where, values, like)


def message(where: Tensor, values: Tensor, numel: int) -> Parts:
    """Encode entries as the parts of a message."""
    return encode(where, numel), values


def decode_indices(parts: Parts, numel: int) -> Tensor:
    """Decode the indices of a message."""
    return decode(parts[0], parts[1].numel(), numel)


def add(parts: Parts, into: Tensor, weight: float) -> None:
    """Add the entries of a message."""
    add_at(decode_indices(parts, into.numel()), parts[1], into, weight)


def add_at(where: Tensor, values: Tensor, into: Tensor, weight: float = 1.0) -> None:
    """Add values at these flat indices, whatever the strides of ``into``."""
    row = into.reshape(-1)  # a view where possible
    row.index_add_(0, where, values.to(into.dtype), alpha=weight)
    if row.data_ptr() != into.data_ptr():
        into.copy_(row.view_as(into))


def to_dense(where: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with these values at their indices, and zero elsewhere."""
    whole = torch.zeros_like(like)
    add_at(where, values, whole)
    return whole


def encode(where: Tensor, numel: int) -> Tensor:
    """Encode ascending indices below ``numel`` in ``code_nbytes`` bytes."""
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
    """Decode the k indices that :func:`encode` wrote."""
    width = _width(k, numel)
    if width > 1 and (code.data_ptr() % width or not code.is_contiguous()):
        code = code.clone()  # a view as wider numbers must be aligned
    if width not in BLOCKS:
        return code.view(torch.int32 if width == 4 else torch.int64).long()
    block = BLOCKS[width]
    numbers = code.long() if width == 1 else code.view(torch.int16).long() + LOWEST
    blocks = -(-numel // block)
    starts = torch.arange(0, blocks * block, block, device=code.device)
    return starts.repeat_interleave(numbers[:blocks], output_size=k) + numbers[blocks:]


def code_nbytes(k: int, numel: int) -> int:
    """Return how many bytes k indices below ``numel`` take."""
    width = _width(k, numel)
    return width * (k + (-(-numel // BLOCKS[width]) if width in BLOCKS else 0))


def _width(k: int, numel: int) -> int:
    """Return the bytes per number that make the code shortest; plain indices win a tie."""
    plain = 4 if numel <= 2**31 else 8
    sizes = {width: width * (k + -(-numel // block)) for width, block in BLOCKS.items()}
    sizes[plain] = plain * k
    return min(sizes, key=lambda width: (sizes[width], -width))
