"""Natural compression: round each number at random to a power of two, and send sign and exponent.

References:
    Horváth et al., `Natural compression <https://arxiv.org/abs/1905.10988>`_, 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit.bit_packing import pack, unpack
from shoal.axes.compression.kit.blocks import add_pieces, pieces
from shoal.axes.compression.kit.stochastic_rounding import generator, integers
from shoal.flow import Agreed, Flow, Gather

MANTISSA = 23  # bits of a float32 that are not sent
INFINITE = 0x7F800000  # the bits of infinity; the bits of NaN are a higher number


def natural() -> Compressor:
    """Round each number at random, without bias, to a power of two; send its sign and exponent.

    A number takes 9 bits, as in the paper: 8 for the exponent and 1 for the sign. It is rounded up
    with a probability equal to its mantissa. For this, random bits are added to the mantissa, and a
    carry increases the exponent. The expected squared error is at most 1/8 of the squared norm.

    Differs from the paper: float64 is first rounded to float32. NaN, and numbers that are rounded
    up above 2^127, are decoded as infinite.
    """

    def flow(value: Value, state: None, round: int) -> Flow:
        ask = Gather(encode(value, round), add, like=value.tensor)
        return Agreed((yield ask), ask, state=None)

    traits = Trait.UNBIASED | Trait.CONTRACTIVE | Trait.SLICEABLE | Trait.ONE_SHOT
    return Compressor("natural", traits, flow, add=add)


def encode(value: Value, round: int) -> tuple[Tensor, ...]:
    """Return the exponents, one byte each, and the signs, eight in a byte."""
    flat = value.tensor.reshape(-1)
    rng = generator(value.name, flat, round)
    exponents = flat.new_empty(flat.numel(), dtype=torch.uint8)
    for piece in pieces(flat.numel()):
        magnitude = flat[piece].to(torch.float32).abs().view(torch.int32)
        up = integers(magnitude.numel(), torch.int32, rng).bitwise_and_(2**MANTISSA - 1)
        exponents[piece] = magnitude.clamp_(max=INFINITE).add_(up).bitwise_right_shift_(MANTISSA)
    return exponents, pack(flat < 0, 1)


def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
    """Add ``weight`` times a message to ``into``; numbers are built from the bits of a float32."""
    exponents, signs = parts[0], unpack(parts[1], 1, into.numel())

    def decode(piece: slice) -> Tensor:
        bits = exponents[piece].to(torch.int32).bitwise_left_shift_(MANTISSA)
        return bits.add_(signs[piece].to(torch.int32).bitwise_left_shift_(31)).view(torch.float32)

    add_pieces(into, weight, decode)
