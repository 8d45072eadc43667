"""1-bit SGD: send one bit per number and two means per column, and send the error later.

References:
    Seide et al., `1-bit stochastic gradient descent
    <https://doi.org/10.21437/Interspeech.2014-274>`_, 2014, Section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit.bit_packing import pack, unpack
from shoal.axes.compression.kit.blocks import add_pieces, block_range, pieces, wide
from shoal.axes.compression.kit.residual import add_residual, one_residual
from shoal.flow import Agreed, Flow, Gather

SHORTEST = 64  # fewest numbers in a column; its two float32 means take 64 bits, as many as 64 codes


def onebit() -> Compressor:
    """Send 1 bit per number and two means per column. The error is kept and sent later.

    The bit is 1 if a number is positive. A positive number is decoded to the mean of the positive
    numbers of its column, any other number to the mean of the others. A column holds the weights of
    one output, which is a row of the weight matrix in torch. Vectors, slices, and matrices with
    rows shorter than 64 are one column. It keeps a residual, so it needs no ``error_feedback``.

    Differs from the paper: the sum over workers is not quantised again, because no worker sends it.
    """

    def flow(value: Value, state: tuple[Tensor], round: int) -> Flow:
        v = add_residual(value.tensor, state[0])  # v = g + e
        ask = Gather(encode(v.view(-1), columns(v)), add, like=value.tensor)
        mean = yield ask
        ask.subtract_from(v)  # e = v - Q(v)
        return Agreed(mean, ask, (v,))

    traits = Trait.CONTRACTIVE | Trait.CONSERVING | Trait.SLICEABLE | Trait.ONE_SHOT
    return Compressor("onebit", traits, flow, one_residual, add, width=1)


def columns(tensor: Tensor) -> int:
    """Return the number of columns: the first dimension, or 1 if columns would be too short."""
    if tensor.dim() < 2 or tensor.numel() < SHORTEST * tensor.shape[0] or not tensor.numel():
        return 1
    return tensor.shape[0]


def encode(v: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return the bits, eight in a byte, and the means of ``count`` columns, (2, count)."""
    codes = v.new_empty(v.numel(), dtype=torch.int8)
    length = v.numel() // count
    high, low, ups = v.new_zeros(3, count, dtype=torch.float64)
    for piece in pieces(v.numel(), length if count > 1 else 1):
        where = block_range(piece, length)  # several whole columns, or (a part of) a single one
        x = v[piece].to(wide(v.dtype)).view(where.stop - where.start, -1)
        up = torch.gt(x, 0, out=torch.empty_like(x))  # a float output is far faster than bool
        codes[piece] = up.view(-1)
        ups[where] += up.sum(1)
        high[where] += x.clamp(min=0).sum(1)
        low[where] += x.clamp(max=0).sum(1)
    means = torch.stack((high / ups.clamp(min=1), low / (length - ups).clamp(min=1)))
    return pack(codes, 1), means.to(wide(v.dtype))


def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
    """Add ``weight`` times a message to ``into``: each number is the mean that its bit selects."""
    ups, (high, low) = unpack(parts[0], 1, into.numel()), parts[1]
    length = into.numel() // high.numel()

    def decode(piece: slice) -> Tensor:
        where = block_range(piece, length)
        up = ups[piece].to(high.dtype).view(where.stop - where.start, -1)
        return torch.lerp(low[where].unsqueeze(1), high[where].unsqueeze(1), up).view(-1)

    add_pieces(into, weight, decode, block=length if high.numel() > 1 else 1)
