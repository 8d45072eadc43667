"""Sufficient factors: a linear layer's gradient is a product of two thin matrices; send these.

References:
    Zhang et al., `Poseidon <https://arxiv.org/abs/1706.03292>`_, 2017, Section 3.2.
    Xie et al., `Distributed machine learning via sufficient factor broadcasting
    <https://arxiv.org/abs/1511.08486>`_, 2015.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit.message_size import MARKS, agree
from shoal.flow import Agreed, Dense, Flow, Gather, Mean


def sufficient_factors() -> Compressor:
    """Send a linear layer's gradient as its two factors where they are smaller; nothing is lost.

    With a batch of K, a gradient of M x N is the sum of u v^T over K pairs: K (M + N) numbers. All
    other tensors are sent as they are, and so is a gradient that has other terms (from a shared
    weight, or a penalty), which a random projection detects.

    Differs from the paper: the choice depends on the size of one message, not on the number of
    workers and servers; if K is too large on one worker, all workers send the matrix.
    """

    def flow(value: Value, state: None, round: int) -> Flow:
        tensor, most = value.tensor, max_rows(value.tensor)
        bound = None
        if most > 0:
            u, v = factors(value, round)
            count = u.shape[0] if tensor.shape == (u.shape[1], v.shape[1]) else None
            bound = yield from agree(count, most, tensor)
        if bound is None:
            return Agreed((yield Mean(tensor)), Dense(tensor), None)
        sent = (pad_rows(u, bound), pad_rows(v, bound))
        return Agreed((yield Gather(sent, add, tensor)), Dense(tensor), None)

    traits = Trait.LOSSLESS | Trait.UNBIASED | Trait.FACTORS
    return Compressor("sufficient_factors", traits, flow, add=add)


def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
    """Add the product of the factors."""
    u, v = (part.to(into.dtype) for part in parts)  # (K, M), (K, N)
    into.addmm_(u.T, v, alpha=weight)


def max_rows(tensor: Tensor) -> int:
    """Return the largest K for which factors, and the ask for K, are smaller than the matrix."""
    if tensor.dim() != 2:
        return 0
    rows, cols = tensor.shape
    return (rows * cols - MARKS - 3) // max(1, rows + cols)


def factors(value: Value, round: int) -> tuple[Tensor, Tensor]:
    """Return u (K, M) and v (K, N) with u.T @ v the gradient; empty ones if there are none."""
    g, none = value.tensor, value.tensor.new_empty(0, 0)
    if value.factors is None:
        return none, none
    u, v = (factor.to(g.dtype) for factor in value.factors)
    if (u.shape[1], v.shape[1]) != g.shape:
        return none, none
    seed = zlib.crc32(f"{value.name}/{round}".encode())
    x = torch.randn(len(g.T), generator=torch.Generator().manual_seed(seed)).to(g)
    expected, product = g @ x, u.T @ (v @ x)
    off = torch.linalg.vector_norm(expected - product)
    near = torch.finfo(g.dtype).eps ** 0.5 * torch.linalg.vector_norm(expected)
    return (u, v) if bool(off <= near) else (none, none)


def pad_rows(factor: Tensor, count: int) -> Tensor:
    """Pad a factor with rows of zeros, which add nothing, to the common size."""
    rest = factor.new_zeros(count - factor.shape[0], factor.shape[1])
    return torch.cat([factor, rest])
