"""PowerSGD: low-rank gradients by one step of power iteration, started from the last result.

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
    """Send each gradient matrix as two factors of low rank; what these miss is lost.

    Sends ``rank * (rows + cols)`` numbers in place of ``rows * cols``, in two asks. Vectors, and
    matrices that would not get smaller, are sent as they are. Use it with ``error_feedback``.

    Args:
        rank: of the approximation; a higher rank is closer and takes more bytes.

    Example: ``powersgd(1)``, ``powersgd(2)``.

    Differs from the paper: orthogonalises by QR, where the paper uses Gram-Schmidt; q starts from a
    generator seeded by the parameter's name, so that all workers start with the same.
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
    """Run one round; without q in the state, send the tensor as it is.

    1. p = orthogonalise(mean of m q), with q (cols, rank) from the round before.
    2. q' = mean of p' m; the mean is p q'.

    In each product the flat matrix stands on the left: the other way takes up to 16 times as long.
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
    """What was sent: the product of p (rows, rank) and factor (rank, cols), in this shape."""

    p: Tensor
    factor: Tensor
    shape: torch.Size

    def dense(self) -> Tensor:
        """Return the product."""
        return (self.p @ self.factor).view(self.shape)

    def subtract_from(self, tensor: Tensor) -> None:
        """Subtract the product in the same pass that computes it."""
        tensor.view(self.p.shape[0], -1).addmm_(self.p, self.factor, alpha=-1)


def orthogonal(p: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns; QR needs at least single precision."""
    wide = p.float() if p.dtype in (torch.float16, torch.bfloat16) else p
    q: Tensor = torch.linalg.qr(wide).Q
    return q.to(p.dtype)


def _mean(p: Tensor, q: Tensor, value: Value) -> Tensor:
    """Return p q, in ``value.out`` if possible: new memory takes longer than the product."""
    out = value.out
    if out is None or not out.is_contiguous():
        return (p @ q).view(value.tensor.shape)
    torch.mm(p, q, out=out.view(p.shape[0], -1))
    return out
