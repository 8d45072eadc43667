"""Top-k sparsification: send the k largest entries, forget the rest.

References:
    Aji & Heafield, `Sparse communication for distributed gradient descent
    <https://arxiv.org/abs/1704.05021>`_, 2017.
    Stich et al., `Sparsified SGD with memory <https://arxiv.org/abs/1809.07599>`_, 2018 (why it
    needs error feedback).
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.errors import BadArgument
from shoal.flow import Agreed, Flow, Gather


def topk(ratio: float) -> Compressor:
    """Keep the ``ratio`` largest entries in magnitude; wrap it in ``error_feedback``.

    Args:
        ratio: share of the entries that is sent, in (0, 1]; at least one entry.

    Example: ``topk(0.25)``, ``topk(1)``.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise BadArgument(f"topk({ratio})", "ratio must lie in (0, 1], for example topk(0.01)")

    def flow(value: Value, state: None, round: int) -> Flow:
        flat = value.tensor.flatten()  # (numel,)
        k = min(flat.numel(), max(1, int(ratio * flat.numel())))
        where = flat.abs().topk(k, sorted=False).indices  # (k,)
        narrow = torch.int32 if flat.numel() < 2**31 else torch.int64
        parts = (where.to(narrow), flat[where])
        mine = torch.zeros_like(value.tensor)
        add(parts, mine, 1.0)
        mean = yield Gather(parts, add, like=value.tensor)  # indices differ: gather, not sum
        return Agreed(mean, mine, state=None)

    traits = Trait.CONTRACTIVE | Trait.SLICEABLE | Trait.ONE_SHOT
    typed = repr(float(ratio)).removesuffix(".0")  # every digit: equality is by name
    return Compressor(f"topk({typed})", traits, flow, add=add)


def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
    """Add the entries sent to their places."""
    where, values = parts  # (k,), (k,)
    flat = into.view(-1) if into.is_contiguous() else into.reshape(-1)
    flat.index_add_(0, where, values.to(into.dtype), alpha=weight)
    if flat.data_ptr() != into.data_ptr():
        into.copy_(flat.view_as(into))
