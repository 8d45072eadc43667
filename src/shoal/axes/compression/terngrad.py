"""TernGrad: round each number at random to -s, 0 or s, where s is the largest magnitude.

References:
    Wen et al., `TernGrad <https://arxiv.org/abs/1705.07878>`_, 2017, Equations 1 to 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit.bit_packing import pack, unpack
from shoal.axes.compression.kit.blocks import abs_max, add_pieces, factor, pieces, wide
from shoal.axes.compression.kit.stochastic_rounding import generator, rounded
from shoal.flow import Agreed, Flow, Gather


def terngrad() -> Compressor:
    """Send -1, 0 or 1 for each number, at random and without bias, and the largest magnitude.

    A message has 2 bits per number and one scale per tensor. A number g is rounded to nonzero with
    probability |g| / max|g|, so one very large number makes all others noisy.

    Differs from the paper: gradients are not clipped at 2.5 sigma, because clipping is biased (use
    ``distribute(clip=)``). Each worker has its own scale, because messages are decoded one by one.
    """

    def flow(value: Value, state: None, round: int) -> Flow:
        ask = Gather(encode(value, round), add, like=value.tensor)
        return Agreed((yield ask), ask, state=None)

    traits = Trait.UNBIASED | Trait.SLICEABLE | Trait.ONE_SHOT
    return Compressor("terngrad", traits, flow, add=add, width=2)


def encode(value: Value, round: int) -> tuple[Tensor, ...]:
    """Return the codes 0, 1 or 2, four in a byte, and the scale s."""
    flat = value.tensor.reshape(-1)
    rng = generator(value.name, flat, round)
    s = abs_max(flat).to(wide(flat.dtype))  # (1,)
    up = factor(s, 1)
    codes = flat.new_empty(flat.numel(), dtype=torch.uint8)
    for piece in pieces(flat.numel()):
        codes[piece] = rounded(flat[piece] * up, 1, rng)
    return pack(codes, 2), s


def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
    """Add ``weight`` times a message to ``into``: -s, 0 or s for each number."""
    codes, s = unpack(parts[0], 2, into.numel()), parts[1]
    add_pieces(into, weight, lambda piece: codes[piece].to(s.dtype).sub_(1).mul_(s))
