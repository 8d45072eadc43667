"""Sufficient factors: the gradient of a linear layer is a product of two matrices, which are sent.

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
    """Send the two factors of a linear layer's gradient if they are smaller; nothing is lost.

    For a batch of K rows, a gradient (M, N) is the product of factors (K, M) and (K, N), which have
    K (M + N) numbers. All other tensors are sent uncompressed, and so is a gradient that is not
    equal to the product, for example of a shared weight or with a penalty term. A random projection
    detects such a gradient.

    Differs from the paper: the choice depends on the size of one message, not on the number of
    workers and servers. If K is too large on one worker, all workers send the matrix.
    """

    def flow(value: Value, state: None, round: int) -> Flow:
        tensor, limit = value.tensor, max_rows(value.tensor)
        common_rows = None
        if limit > 0:
            u, v = factors(value, round)
            rows = u.shape[0] if tensor.shape == (u.shape[1], v.shape[1]) else None
            common_rows = yield from agree(rows, limit, tensor)
        if common_rows is None:
            return Agreed((yield Mean(tensor)), Dense(tensor), None)
        sent = (pad_rows(u, common_rows), pad_rows(v, common_rows))
        return Agreed((yield Gather(sent, add, tensor)), Dense(tensor), None)

    traits = Trait.LOSSLESS | Trait.UNBIASED | Trait.FACTORS
    return Compressor("sufficient_factors", traits, flow, add=add)


def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
    """Add ``weight`` times the product of the factors to ``into``, in place."""
    u, v = (part.to(into.dtype) for part in parts)  # (K, M), (K, N)
    into.addmm_(u.T, v, alpha=weight)


def max_rows(tensor: Tensor) -> int:
    """Return the largest K for which the factors and the ask for K are smaller than the matrix."""
    if tensor.dim() != 2:
        return 0
    rows, cols = tensor.shape
    return (rows * cols - MARKS - 3) // max(1, rows + cols)


def factors(value: Value, round: int) -> tuple[Tensor, Tensor]:
    """Return u (K, M) and v (K, N) with u.T @ v == gradient, or empty tensors if none are valid."""
    g, none = value.tensor, value.tensor.new_empty(0, 0)
    if value.factors is None:
        return none, none
    u, v = (factor.to(g.dtype) for factor in value.factors)
    if (u.shape[1], v.shape[1]) != g.shape:
        return none, none
    seed = zlib.crc32(f"{value.name}/{round}".encode())
    x = torch.randn(len(g.T), generator=torch.Generator().manual_seed(seed)).to(g)
    expected, product = g @ x, u.T @ (v @ x)
    error = torch.linalg.vector_norm(expected - product)
    tolerance = torch.finfo(g.dtype).eps ** 0.5 * torch.linalg.vector_norm(expected)
    return (u, v) if bool(error <= tolerance) else (none, none)


def pad_rows(factor: Tensor, count: int) -> Tensor:
    """Return a factor with ``count`` rows, by appending rows of zeros, which add nothing."""
    rest = factor.new_zeros(count - factor.shape[0], factor.shape[1])
    return torch.cat([factor, rest])
