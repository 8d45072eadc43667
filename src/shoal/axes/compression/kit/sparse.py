"""Sparse messages: the values of some entries, and a short code of their indices.

The tensor is divided into blocks. The code has the number of sent entries in each block, then the
offset of each sent entry inside its block. It has the same size for any k indices, so the messages
of all workers are equally long. A code of index differences would vary in size. If one percent
of the entries is sent, an index takes 1.4 bytes instead of 4.

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
BLOCKS = {1: 2**8 - 1, 2: 2**16 - 1}  # bytes per number -> entries per block, so that a count fits
LOWEST = 2**15  # subtracted from 16-bit numbers, because few backends can send unsigned 16-bit ones


def check_ratio(call: str, ratio: object, before: str = "") -> None:
    """Raise unless ``ratio`` lies in (0, 1]; ``before`` are the arguments before it, as a text."""
    if not (is_number(ratio) and 0 < ratio <= 1):
        why = f"ratio must lie in (0, 1], for example {call}({before}0.01)"
        raise BadArgument(f"{call}({before}{ratio})", why)


def share(ratio: float, numel: int) -> int:
    """Return how many of ``numel`` entries to send: a share of ``ratio``, but at least one."""
    return min(numel, max(1, int(ratio * numel)))


class SparseSent(NamedTuple):
    """What was sent: ``values`` at the flat indices ``where`` of a tensor shaped like ``like``."""

    where: Tensor
    values: Tensor
    like: Tensor

    def dense(self) -> Tensor:
        """Return what was sent as a dense tensor, with zeros for all other entries."""
        return to_dense(self.where, self.values, self.like)

    def subtract_from(self, tensor: Tensor) -> None:
        """Subtract the sent entries in place. An inf or NaN that was sent leaves 0, not NaN."""
        row = tensor.view(-1)
        rest = row[self.where].sub_(self.values)
        row[self.where] = rest.nan_to_num_(0.0, math.inf, -math.inf)


def send(where: Tensor, values: Tensor, like: Tensor) -> Generator[Ask, Any, tuple[Tensor, Sent]]:
    """Send ``values`` at indices ``where``; return the mean over workers, and what was sent.

    Workers send different entries, so messages are gathered: an all-reduce cannot sum them.
    """
    mean = yield Gather(message(where, values, like.numel()), add, like)
    return mean, SparseSent(where, values, like)


def message(where: Tensor, values: Tensor, numel: int) -> Parts:
    """Return the parts of a message: the code of the indices, and the values."""
    return encode(where, numel), values


def decode_indices(parts: Parts, numel: int) -> Tensor:
    """Return the indices of the entries of a message."""
    return decode(parts[0], parts[1].numel(), numel)


def add(parts: Parts, into: Tensor, weight: float) -> None:
    """Add ``weight`` times the entries of a message to ``into``, in place."""
    add_at(decode_indices(parts, into.numel()), parts[1], into, weight)


def add_at(where: Tensor, values: Tensor, into: Tensor, weight: float = 1.0) -> None:
    """Add ``weight * values`` to ``into`` at these flat indices, in place, for any strides."""
    row = into.reshape(-1)  # a view where possible
    row.index_add_(0, where, values.to(into.dtype), alpha=weight)
    if row.data_ptr() != into.data_ptr():
        into.copy_(row.view_as(into))


def to_dense(where: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """Return a tensor shaped like ``like`` with these values at these indices, and 0 elsewhere."""
    whole = torch.zeros_like(like)
    add_at(where, values, whole)
    return whole


def encode(where: Tensor, numel: int) -> Tensor:
    """Return the code of ascending indices below ``numel``, as uint8."""
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
    """Return the k indices from the code that :func:`encode` returned."""
    width = _width(k, numel)
    if width > 1 and (code.data_ptr() % width or not code.is_contiguous()):
        code = code.clone()  # only aligned, contiguous memory can be viewed as wider numbers
    if width not in BLOCKS:
        return code.view(torch.int32 if width == 4 else torch.int64).long()
    block = BLOCKS[width]
    numbers = code.long() if width == 1 else code.view(torch.int16).long() + LOWEST
    blocks = -(-numel // block)
    starts = torch.arange(0, blocks * block, block, device=code.device)
    return starts.repeat_interleave(numbers[:blocks], output_size=k) + numbers[blocks:]


def code_nbytes(k: int, numel: int) -> int:
    """Return the number of bytes of the code of k indices below ``numel``."""
    width = _width(k, numel)
    return width * (k + (-(-numel // BLOCKS[width]) if width in BLOCKS else 0))


def _width(k: int, numel: int) -> int:
    """Return the bytes per number of the shortest code; 4 or 8 mean plain indices."""
    plain = 4 if numel <= 2**31 else 8
    sizes = {width: width * (k + -(-numel // block)) for width, block in BLOCKS.items()}
    sizes[plain] = plain * k
    return min(sizes, key=lambda width: (sizes[width], -width))
