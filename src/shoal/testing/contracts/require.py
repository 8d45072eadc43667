"""Check a law, and compare results. ``assert`` is not used, because ``python -O`` removes it."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.flow import Agreed


def require(holds: bool, *message: object) -> None:
    """Raise AssertionError unless ``holds``. Its message is the parts, joined by spaces."""
    if not holds:
        raise AssertionError(" ".join(map(str, message)))


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether shapes are equal and entries differ by <= ``tolerance * (1 + largest magnitude)``."""
    if a.shape != b.shape:
        return False
    if a.numel() == 0:
        return True
    wide_a, wide_b = a.to(torch.float64), b.to(torch.float64)
    largest = float(torch.maximum(wide_a.abs(), wide_b.abs()).max())
    return float((wide_a - wide_b).abs().max()) <= tolerance * (1 + largest)


def same(a: object, b: object) -> bool:
    """Return whether two nested containers of tensors and numbers are exactly equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Agreed) and isinstance(b, Agreed):
        return same((a.mean, a.mine.dense(), a.state), (b.mean, b.mine.dense(), b.state))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return bool(a == b)
