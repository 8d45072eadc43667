"""Low-rank gradients by one power iteration, warm-started.

References:
    Vogels, Karimireddy & Jaggi, `PowerSGD <https://arxiv.org/abs/1905.13727>`_, 2019, Algorithm 1.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit.residual import plus, zeros
from shoal.errors import BadArgument
from shoal.flow import Agreed, Ask, Flow, Mean


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

    def start(value: Value) -> tuple[Tensor, Tensor | None]:
        return zeros(value.tensor), init(value)

    name, traits = f"powersgd({rank})", Trait.CONTRACTIVE | Trait.SUMS
    conserving = traits | Trait.CONSERVING
    feedback = Compressor(f"error_feedback({name})", conserving, fed, start)
    return Compressor(name, traits, flow, init, feedback=feedback)


def flow(value: Value, state: Tensor | None, round: int) -> Flow:
    """A round; without factors the tensor travels as it is."""
    if state is None:
        mine = value.tensor.clone()
        return Agreed((yield Mean(value.tensor)), mine, None)
    p, factor, q = yield from power(value.tensor.flatten(1), state)
    own = partial(_product, p, factor, value.tensor.shape)
    return Agreed(_mean(p, q, value), own, q.T.contiguous())


def fed(value: Value, state: tuple[Tensor, Tensor | None], round: int) -> Flow:
    """A round under error feedback: what was not sent is left in one pass."""
    residual, kept = state
    if kept is None:
        whole = value.tensor + residual
        return Agreed((yield Mean(whole.clone())), whole, (torch.zeros_like(residual), None))
    wanted, _ = plus(value.tensor, residual)
    m, shape = wanted.flatten(1), wanted.shape
    p, factor, q = yield from power(m, kept)
    m.addmm_(p, factor, alpha=-1)
    own = partial(_product, p, factor, shape)
    return Agreed(_mean(p, q, value), own, (wanted, q.T.contiguous()))


def power(m: Tensor, q: Tensor) -> Generator[Ask, Any, tuple[Tensor, Tensor, Tensor]]:
    """A step of power iteration on everybody's m (rows, cols), from q (cols, rank).

    Returns p (rows, rank), orthonormal; my factor, p' m; and everybody's, both (rank, cols). The
    flat side stands left in each product: the other way round takes up to 16 times as long.
    """
    p = orthogonal((yield Mean(q.T.contiguous() @ m.T)).T)  # ask 1
    factor = p.T.contiguous() @ m
    return p, factor, (yield Mean(factor.clone()))  # ask 2


def orthogonal(p: Tensor) -> Tensor:
    """An orthonormal basis of the columns; in single precision at least, for QR has no half."""
    wide = p.float() if p.dtype in (torch.float16, torch.bfloat16) else p
    q: Tensor = torch.linalg.qr(wide).Q
    return q.to(p.dtype)


def _mean(p: Tensor, q: Tensor, value: Value) -> Tensor:
    """Everybody's, where it is wanted: new memory would cost more than the product."""
    out = value.out
    if out is None or not out.is_contiguous():
        return (p @ q).view(value.tensor.shape)
    torch.mm(p, q, out=out.view(p.shape[0], -1))
    return out


def _product(p: Tensor, factor: Tensor, shape: torch.Size) -> Tensor:
    return (p @ factor).view(shape)
