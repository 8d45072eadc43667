"""Low-rank gradients by one power iteration, warm-started.

References:
    Vogels, Karimireddy & Jaggi, `PowerSGD <https://arxiv.org/abs/1905.13727>`_, 2019, Algorithm 1.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.errors import BadArgument
from shoal.flow import Agreed, Flow, Mean


def powersgd(rank: int = 1) -> Compressor:
    """Approximate each gradient matrix by one of low rank.

    Sends ``rank * (rows + cols)`` numbers in place of ``rows * cols``, in two asks. Vectors, and
    matrices that would not get smaller, travel as they are. Wrap it in ``error_feedback``.

    Args:
        rank: columns kept; more is closer and dearer.

    Example: ``powersgd(1)``, ``powersgd(2)``.

    Differs from the paper: orthogonalises by QR, where the paper uses Gram-Schmidt; the factors
    start from a generator seeded by the parameter's name, so that all workers hold the same.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise BadArgument(f"powersgd({rank})", "rank must be a whole number >= 1")

    def shrinks(tensor: Tensor) -> bool:
        if tensor.dim() < 2 or not tensor.is_floating_point():
            return False
        rows, cols = tensor.shape[0], tensor.numel() // max(1, tensor.shape[0])
        return rank * (rows + cols) < rows * cols

    def init(value: Value) -> Tensor | None:
        if not shrinks(value.tensor):
            return None
        start = torch.Generator().manual_seed(zlib.crc32(value.name.encode()))
        cols = value.tensor[0].numel()
        q = torch.randn(cols, rank, generator=start, dtype=torch.float64)
        return q.to(value.tensor)

    def flow(value: Value, state: Tensor | None, round: int) -> Flow:
        if state is None:
            mine = value.tensor.clone()
            return Agreed((yield Mean(value.tensor)), mine, None)
        m = value.tensor.flatten(1)  # (rows, cols)
        p = orthogonal((yield Mean(m @ state)))  # (rows, rank): ask 1
        factor = m.T @ p  # (cols, rank)
        mine = (p @ factor.T).view(value.tensor.shape)
        q = yield Mean(factor)  # (cols, rank): ask 2
        return Agreed((p @ q.T).view(value.tensor.shape), mine, q.clone())

    return Compressor(f"powersgd({rank})", Trait.CONTRACTIVE | Trait.SUMS, flow, init)


def orthogonal(p: Tensor) -> Tensor:
    """An orthonormal basis of the columns; in single precision at least, for QR has no half."""
    wide = p.float() if p.dtype in (torch.float16, torch.bfloat16) else p
    q: Tensor = torch.linalg.qr(wide).Q
    return q.to(p.dtype)
