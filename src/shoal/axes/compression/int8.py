"""Block-wise 8-bit quantisation: each block is scaled by its largest magnitude and rounded.

References:
    Dettmers, `8-bit approximations for parallelism <https://arxiv.org/abs/1511.04561>`_, 2016.
    Dettmers et al., `8-bit optimizers via block-wise quantization
    <https://arxiv.org/abs/2110.02861>`_, 2022 (why blocks: an outlier affects only its own).
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit.blocks import add_pieces, blocks, factor, of_blocks, pieces, wide
from shoal.errors import BadArgument
from shoal.flow import Agreed, Flow, Gather
from shoal.notation import is_whole

TOP = 127


def int8(block: int = 256) -> Compressor:
    """Send each number in 8 bits, rounded to the nearest of 255 levels, and one scale per block.

    Takes ``1 + 4 / block`` bytes per number. The error is at most 1/254 of the largest magnitude in
    the block. Rounding is biased, but by little: it does well alone, and ``error_feedback(int8)``
    loses nothing.

    Args:
        block: consecutive numbers that share a scale; smaller blocks are more precise, and larger.

    Example: ``int8(64)``.

    Differs from the papers: levels are evenly spaced, where theirs are denser near zero.
    """
    if not is_whole(block, 1):
        raise BadArgument(f"int8({block})", "block must be a whole number >= 1, such as 256")

    def flow(value: Value, state: None, round: int) -> Flow:
        ask = Gather(encode(value.tensor.reshape(-1)), add, like=value.tensor)
        return Agreed((yield ask), ask, state=None)

    def encode(flat: Tensor) -> tuple[Tensor, ...]:
        codes = flat.new_empty(flat.numel(), dtype=torch.int8)
        scales = flat.new_empty(-(-flat.numel() // block), dtype=wide(flat.dtype))
        for piece in pieces(flat.numel(), block):
            x = blocks(flat[piece], block)  # (blocks, block)
            most = torch.maximum(x.amax(1), x.amin(1).neg_()).abs_()  # never -0
            scales[of_blocks(piece, block)] = most / TOP
            code = (x * factor(most, TOP).unsqueeze(1)).round_()
            codes[piece] = code.view(-1)[: piece.stop - piece.start]
        return codes, scales

    def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
        codes, scales = parts

        def decode(piece: slice) -> Tensor:
            code = blocks(codes[piece], block).to(scales.dtype)  # (blocks, block)
            numbers = code.mul_(scales[of_blocks(piece, block)].unsqueeze(1))
            return numbers.view(-1)[: piece.stop - piece.start]

        add_pieces(into, weight, decode, block=block)

    traits = Trait.CONTRACTIVE | Trait.SLICEABLE | Trait.ONE_SHOT
    return Compressor(f"int8({block})", traits, flow, add=add)
