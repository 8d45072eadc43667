"""What sparsifiers share: a message of places and values, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from shoal.axes.compression.indices import decode, encode
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
