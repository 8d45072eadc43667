"""1-bit SGD: one bit a number, decoded to its column's mean; what is lost is sent later.

References:
    Seide et al., `1-bit stochastic gradient descent
    <https://doi.org/10.21437/Interspeech.2014-274>`_, 2014, Section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value, gathered
from shoal.axes.compression.kit.bit_packing import pack, unpack
from shoal.axes.compression.kit.blocks import add_pieces, of_blocks, pieces, wide
from shoal.axes.compression.kit.residual import plus, zeros
from shoal.flow import Agreed, Flow

SHORTEST = 64  # numbers of a column; its two means weigh as much as the bits of so many


def onebit() -> Compressor:
    """Send the sign of each number, and the means of what is positive and what is not a column.

    Takes 1 bit a number and two means a column. A column is what belongs to one output: a row of
    torch's weight matrix. Vectors, slices, and matrices with rows shorter than 64 are one column.
    It keeps its own residual, so it needs no ``error_feedback``.

    Differs from the paper: columns are those that lie together in torch's memory; the sum of all
    is not quantised again, for it is nobody's message.
    """

    def init(value: Value) -> tuple[Tensor]:
        return (zeros(value.tensor),)

    def flow(value: Value, state: tuple[Tensor], round: int) -> Flow:
        wanted, row = plus(value.tensor, state[0])  # v = g + e
        parts = encode(row, columns(wanted))
        mean, mine = yield from gathered(value, parts, add)
        add(parts, wanted, -1.0)
        return Agreed(mean, mine, (wanted,))

    traits = Trait.CONTRACTIVE | Trait.CONSERVING | Trait.SLICEABLE | Trait.ONE_SHOT
    return Compressor("onebit", traits, flow, init, add, width=1)


def columns(tensor: Tensor) -> int:
    """How many columns share the numbers of a tensor."""
    if tensor.dim() < 2 or tensor.numel() < SHORTEST * tensor.shape[0] or not tensor.numel():
        return 1
    return tensor.shape[0]


def encode(v: Tensor, count: int) -> tuple[Tensor, ...]:
    """Whether each number is positive, eight to a byte; and two means a column, (2, columns)."""
    codes = v.new_empty(v.numel(), dtype=torch.int8)
    length = v.numel() // count
    high, low, ups = v.new_zeros(3, count, dtype=torch.float64)
    for piece in pieces(v.numel(), length if count > 1 else 1):
        where = of_blocks(piece, length)  # one column may be many pieces, or a piece many columns
        x = v[piece].to(wide(v.dtype)).view(where.stop - where.start, -1)
        up = torch.gt(x, 0, out=torch.empty_like(x))  # compared into floats: far faster
        codes[piece] = up.view(-1)
        ups[where] += up.sum(1)
        high[where] += x.clamp(min=0).sum(1)
        low[where] += x.clamp(max=0).sum(1)
    means = torch.stack((high / ups.clamp(min=1), low / (length - ups).clamp(min=1)))
    return pack(codes, 1), means.to(wide(v.dtype))


def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
    """Add the mean of each number's side of its column."""
    ups, (high, low) = unpack(parts[0], 1, into.numel()), parts[1]
    length = into.numel() // high.numel()

    def decode(piece: slice) -> Tensor:
        where = of_blocks(piece, length)
        up = ups[piece].to(high.dtype).view(where.stop - where.start, -1)
        return torch.lerp(low[where].unsqueeze(1), high[where].unsqueeze(1), up).view(-1)

    add_pieces(into, weight, decode, block=length if high.numel() > 1 else 1)
