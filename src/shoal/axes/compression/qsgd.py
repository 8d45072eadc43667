"""QSGD: round each number at random to one of a few levels, scaled by the norm of its bucket.

References:
    Alistarh et al., `QSGD <https://arxiv.org/abs/1610.02132>`_, 2017, Section 3.1 and, for buckets
    of 512, Section 5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit.bit_packing import pack, unpack
from shoal.axes.compression.kit.blocks import add_pieces, block_range, blocks, factor, pieces, wide
from shoal.axes.compression.kit.stochastic_rounding import generator, rounded
from shoal.errors import BadArgument
from shoal.flow import Agreed, Flow, Gather
from shoal.notation import is_whole

BUCKET = 512  # numbers that share a norm; with one norm per tensor, most numbers would become zero


def qsgd(levels: int = 16) -> Compressor:
    """Round each number at random, without bias, to one of ``2 * levels + 1`` levels.

    Every 512 consecutive numbers form a bucket and share one L2 norm. A number takes 6 bits with 16
    levels, 5 with 15, 4 with 7, and 2 with 1; the norm takes 4 bytes (8 for float64) per bucket.

    Args:
        levels: s in the paper, from 1 to 127; fewer levels take fewer bits and add more noise.

    Example: ``qsgd(16)``.

    Differs from the paper: codes have a fixed width (``coded`` adds Elias coding). In float32, a
    bucket with a norm above about 1e19, whose square overflows, is decoded as not finite.
    """
    if not is_whole(levels, 1, 127):
        raise BadArgument(f"qsgd({levels})", "levels must be a whole number from 1 to 127")
    width = (2 * levels).bit_length()

    def flow(value: Value, state: None, round: int) -> Flow:
        ask = Gather(encode(value, round), add, like=value.tensor)
        return Agreed((yield ask), ask, state=None)

    def encode(value: Value, round: int) -> tuple[Tensor, ...]:
        flat = value.tensor.reshape(-1)
        rng = generator(value.name, flat, round)
        codes = flat.new_empty(flat.numel(), dtype=torch.uint8)
        norms = flat.new_empty(-(-flat.numel() // BUCKET), dtype=wide(flat.dtype))
        for piece in pieces(flat.numel(), BUCKET):
            x = blocks(flat[piece], BUCKET)  # (buckets, 512)
            norm = torch.linalg.vector_norm(x, dim=1)
            norms[block_range(piece, BUCKET)] = norm
            code = rounded(x * factor(norm, levels).unsqueeze(1), levels, rng)
            codes[piece] = code.view(-1)[: piece.stop - piece.start]
        return pack(codes, width), norms

    def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
        codes, norms = unpack(parts[0], width, into.numel()), parts[1] / levels

        def decode(piece: slice) -> Tensor:
            code = blocks(codes[piece], BUCKET).to(norms.dtype).sub_(levels)  # (buckets, 512)
            numbers = code.mul_(norms[block_range(piece, BUCKET)].unsqueeze(1))
            return numbers.view(-1)[: piece.stop - piece.start]

        add_pieces(into, weight, decode, block=BUCKET)

    traits = Trait.UNBIASED | Trait.SLICEABLE | Trait.ONE_SHOT
    return Compressor(f"qsgd({levels})", traits, flow, add=add, width=width)
