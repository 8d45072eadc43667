"""Block-wise 8-bit quantisation: scale each block by its largest magnitude, and round to int8.

References:
    Dettmers, `8-bit approximations for parallelism <https://arxiv.org/abs/1511.04561>`_, 2016.
    Dettmers et al., `8-bit optimizers via block-wise quantization
    <https://arxiv.org/abs/2110.02861>`_, 2022 (blocks: an outlier affects only its own block).
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit.blocks import add_pieces, block_range, blocks, factor, pieces, wide
from shoal.errors import BadArgument
from shoal.flow import Agreed, Flow, Gather
from shoal.notation import is_whole

MAX_CODE = 127  # codes lie in [-127, 127]


def int8(block: int = 256) -> Compressor:
    """Send each number in 8 bits, rounded to the nearest of 255 levels, and one scale per block.

    A message has ``1 + 4 / block`` bytes per number (float64: ``1 + 8 / block``). The error is at
    most 1/254 of the largest magnitude in the block. Rounding is biased, but the bias is small, so
    ``int8`` can be used alone; ``error_feedback(int8)`` sends the rounding errors later.

    Args:
        block: how many consecutive numbers share a scale; fewer are more precise, but take more
            bytes.

    Example: ``int8(64)``.

    Differs from the papers: levels are evenly spaced; in the papers they are denser near zero.
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
            # abs_() turns -0 into 0, because the factor of -0 would be -inf.
            max_abs = torch.maximum(x.amax(1), x.amin(1).neg_()).abs_()
            scales[block_range(piece, block)] = max_abs / MAX_CODE
            code = (x * factor(max_abs, MAX_CODE).unsqueeze(1)).round_()
            codes[piece] = code.view(-1)[: piece.stop - piece.start]
        return codes, scales

    def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
        codes, scales = parts

        def decode(piece: slice) -> Tensor:
            code = blocks(codes[piece], block).to(scales.dtype)  # (blocks, block)
            numbers = code.mul_(scales[block_range(piece, block)].unsqueeze(1))
            return numbers.view(-1)[: piece.stop - piece.start]

        add_pieces(into, weight, decode, block=block)

    traits = Trait.CONTRACTIVE | Trait.SLICEABLE | Trait.ONE_SHOT
    return Compressor(f"int8({block})", traits, flow, add=add)
