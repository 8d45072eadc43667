"""Natural compression: round each number by chance to a power of two; send sign and exponent.

References:
    Horváth et al., `Natural compression <https://arxiv.org/abs/1905.10988>`_, 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value, gathered
from shoal.axes.compression.kit.bit_packing import pack, unpack
from shoal.axes.compression.kit.blocks import add_pieces, pieces
from shoal.axes.compression.kit.stochastic_rounding import generator, integers
from shoal.flow import Agreed, Flow

MANTISSA = 23  # bits of a float32 that are not sent
INFINITE = 0x7F800000  # its bits, and the least of what is no number


def natural() -> Compressor:
    """Keep the sign and the exponent of each number, the latter right on average.

    Takes 9 bits a number, those of the paper: a byte of exponent, and a bit of sign. The mantissa
    is the chance of going up: adding as many random bits to it carries into the exponent just so
    often. The error is at most an eighth of the squared length on average.

    Differs from the paper: numbers of 64 bits are rounded to 32 first; what is no number, or beyond
    2^127 by chance, arrives as infinite.
    """

    def flow(value: Value, state: None, round: int) -> Flow:
        parts = encode(value, round)
        mean, mine = yield from gathered(value, parts, add)
        return Agreed(mean, mine, state=None)

    traits = Trait.UNBIASED | Trait.CONTRACTIVE | Trait.SLICEABLE | Trait.ONE_SHOT
    return Compressor("natural", traits, flow, add=add)


def encode(value: Value, round: int) -> tuple[Tensor, ...]:
    """Exponents, a byte each, and signs, eight to a byte."""
    flat = value.tensor.reshape(-1)
    chance = generator(value.name, flat, round)
    exponents = flat.new_empty(flat.numel(), dtype=torch.uint8)
    for piece in pieces(flat.numel()):
        magnitude = flat[piece].to(torch.float32).abs().view(torch.int32)
        up = integers(magnitude.numel(), torch.int32, chance).bitwise_and_(2**MANTISSA - 1)
        exponents[piece] = magnitude.clamp_(max=INFINITE).add_(up).bitwise_right_shift_(MANTISSA)
    return exponents, pack(flat < 0, 1)


def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
    """Add powers of two: bits put back to where a float32 has them."""
    exponents, signs = parts[0], unpack(parts[1], 1, into.numel())

    def decode(piece: slice) -> Tensor:
        bits = exponents[piece].to(torch.int32).bitwise_left_shift_(MANTISSA)
        return bits.add_(signs[piece].to(torch.int32).bitwise_left_shift_(31)).view(torch.float32)

    add_pieces(into, weight, decode)
