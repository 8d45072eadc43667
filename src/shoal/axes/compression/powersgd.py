"""PowerSGD: a low-rank gradient by one step of power iteration, started from the previous round.

References:
    Vogels, Karimireddy & Jaggi, `PowerSGD <https://arxiv.org/abs/1905.13727>`_, 2019, Algorithm 1.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.errors import BadArgument
from shoal.flow import Agreed, Dense, Flow, Mean
from shoal.notation import is_whole


def powersgd(rank: int = 1) -> Compressor:
    """Approximate each gradient matrix by two factors of low rank, and send these.

    Use it with ``error_feedback``. It sends ``rank * (rows + cols)`` numbers in place of ``rows *
    cols``, in two asks. Vectors, and matrices that would not become smaller, are sent uncompressed.

    Args:
        rank: rank of the approximation; a higher rank has a smaller error, but takes more bytes.

    Example: ``powersgd(1)``, ``powersgd(2)``.

    Differs from the paper: p is orthogonalised by QR instead of Gram-Schmidt. The first q is random
    with a seed that is the hash of the parameter's name, so it is equal on all workers.
    """
    if not is_whole(rank, 1):
        raise BadArgument(f"powersgd({rank})", "rank must be a whole number >= 1")

    def init(value: Value) -> Tensor | None:
        tensor = value.tensor
        if tensor.dim() < 2 or not tensor.is_floating_point():
            return None
        rows, cols = tensor.shape[0], tensor.numel() // max(1, tensor.shape[0])
        if rank * (rows + cols) >= rows * cols:
            return None
        start = torch.Generator().manual_seed(zlib.crc32(value.name.encode()))
        return torch.randn(cols, rank, generator=start, dtype=torch.float64).to(tensor)

    return Compressor(f"powersgd({rank})", Trait.CONTRACTIVE | Trait.SUMS, flow, init)


def flow(value: Value, state: Tensor | None, round: int) -> Flow:
    """Run one round for the matrix m. The state is q; if it is None, send the tensor uncompressed.

    1. p = orthogonalise(mean of m q), where q (cols, rank) is from the previous round.
    2. r = mean of p^T m, (rank, cols). The result is p r, and the next q is r^T.

    In products with m the left matrix has few rows. The transposed product can take 16 times as
    long.
    """
    if state is None:
        mine = Dense(value.tensor.clone())
        return Agreed((yield Mean(value.tensor)), mine, None)
    m = value.tensor.flatten(1)  # (rows, cols)
    p = orthogonal((yield Mean(state.T.contiguous() @ m.T)).T)  # ask 1: (rows, rank)
    factor = p.T.contiguous() @ m  # (rank, cols)
    q = yield Mean(factor.clone())  # ask 2: (rank, cols)
    sent = LowRankSent(p, factor, value.tensor.shape)
    return Agreed(_mean(p, q, value), sent, q.T.contiguous())


class LowRankSent(NamedTuple):
    """What was sent: the product of p (rows, rank) and factor (rank, cols), viewed as ``shape``."""

    p: Tensor
    factor: Tensor
    shape: torch.Size

    def dense(self) -> Tensor:
        """Return the product of the factors."""
        return (self.p @ self.factor).view(self.shape)

    def subtract_from(self, tensor: Tensor) -> None:
        """Subtract the product from ``tensor`` in place, without a temporary tensor."""
        tensor.view(self.p.shape[0], -1).addmm_(self.p, self.factor, alpha=-1)


def orthogonal(p: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of p, in p's dtype; QR needs at least float32."""
    wide = p.float() if p.dtype in (torch.float16, torch.bfloat16) else p
    q: Tensor = torch.linalg.qr(wide).Q
    return q.to(p.dtype)


def _mean(p: Tensor, q: Tensor, value: Value) -> Tensor:
    """Return p q, in ``value.out`` if possible. Allocating memory takes longer than the product."""
    out = value.out
    if out is None or not out.is_contiguous():
        return (p @ q).view(value.tensor.shape)
    torch.mm(p, q, out=out.view(p.shape[0], -1))
    return out
