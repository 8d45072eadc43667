"""TernGrad: each number becomes minus the largest, nothing or the largest, by chance.

References:
    Wen et al., `TernGrad <https://arxiv.org/abs/1705.07878>`_, 2017, Equations 1 to 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value, gathered
from shoal.axes.compression.kit.bit_packing import pack, unpack
from shoal.axes.compression.kit.blocks import add_pieces, factor, pieces, wide
from shoal.axes.compression.kit.stochastic_rounding import generator, rounded
from shoal.flow import Agreed, Flow


def terngrad() -> Compressor:
    """Send -1, 0 or 1 for each number, right on average, and the largest magnitude a tensor.

    Takes 2 bits a number and one scale a tensor. A number g is sent with probability |g| / max|g|,
    so heavy tails make much noise.

    Differs from the paper: no clipping at 2.5 sigma, which is biased (use ``distribute(clip=)``);
    each worker has its own scale, for what is sent is decoded before it is summed.
    """

    def flow(value: Value, state: None, round: int) -> Flow:
        parts = encode(value, round)
        mean, mine = yield from gathered(value, parts, add)
        return Agreed(mean, mine, state=None)

    traits = Trait.UNBIASED | Trait.SLICEABLE | Trait.ONE_SHOT
    return Compressor("terngrad", traits, flow, add=add, width=2)


def encode(value: Value, round: int) -> tuple[Tensor, ...]:
    """The codes, four to a byte, and the scale."""
    flat = value.tensor.reshape(-1)
    chance = generator(value.name, flat, round)
    s = largest(flat).to(wide(flat.dtype))  # (1,)
    up = factor(s, 1)
    codes = flat.new_empty(flat.numel(), dtype=torch.uint8)
    for piece in pieces(flat.numel()):
        codes[piece] = rounded(flat[piece] * up, 1, chance)
    return pack(codes, 2), s


def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
    """Add -s, 0 or s."""
    codes, s = unpack(parts[0], 2, into.numel()), parts[1]
    add_pieces(into, weight, lambda piece: codes[piece].to(s.dtype).sub_(1).mul_(s))


def largest(flat: Tensor) -> Tensor:
    """The largest magnitude, (1,), in one pass; NaN if there is one."""
    if flat.numel() == 0:
        return flat.new_zeros(1)
    low, high = torch.aminmax(flat)
    return torch.maximum(-low, high).view(1)
