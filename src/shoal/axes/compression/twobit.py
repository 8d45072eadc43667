"""MXNet's two bits: send plus or minus a threshold once that much has come together.

References:
    Apache MXNet, `Gradient compression
    <https://mxnet.apache.org/api/faq/gradient_compression>`_, 2018.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value, gathered
from shoal.axes.compression.kit.bit_packing import pack, unpack
from shoal.axes.compression.kit.blocks import add_pieces, pieces, wide
from shoal.axes.compression.kit.residual import plus, zeros
from shoal.errors import BadArgument
from shoal.flow import Agreed, Flow
from shoal.notation import is_number, typed


def twobit(threshold: float) -> Compressor:
    """Send -threshold, 0 or +threshold for each number, and keep the rest for later.

    Takes 2 bits a number and one number a tensor. It keeps its own residual, so it needs no
    ``error_feedback``; and a round sends at most one threshold a number, so a threshold far below
    the gradients falls behind, and one far above them waits long.

    Args:
        threshold: what is sent at a time, > 0; about as large as the larger gradients.

    Example: ``twobit(0.05)``.
    """
    if not (is_number(threshold) and 0 < threshold < math.inf):
        raise BadArgument(f"twobit({threshold})", "threshold must be > 0, for example twobit(0.01)")

    def init(value: Value) -> tuple[Tensor]:
        return (zeros(value.tensor),)

    def flow(value: Value, state: tuple[Tensor], round: int) -> Flow:
        wanted, row = plus(value.tensor, state[0])
        parts = encode(row, threshold)
        mean, mine = yield from gathered(value, parts, add)
        add(parts, wanted, -1.0)
        return Agreed(mean, mine, (wanted,))

    traits = Trait.CONSERVING | Trait.SLICEABLE | Trait.ONE_SHOT
    return Compressor(f"twobit({typed(threshold)})", traits, flow, init, add, width=2)


def encode(flat: Tensor, threshold: float) -> tuple[Tensor, ...]:
    """Codes 0, 1, 2 for down, stay, up, four to a byte; and the threshold, NaN if any is."""
    codes = flat.new_empty(flat.numel(), dtype=torch.int8)
    t = flat.new_full((1,), threshold, dtype=wide(flat.dtype))
    for piece in pieces(flat.numel()):
        x = flat[piece].to(t.dtype)
        up, down = torch.empty_like(x), torch.empty_like(x)  # compared into floats: far faster
        torch.ge(x, threshold, out=up)
        torch.le(x, -threshold, out=down)
        codes[piece] = up.sub_(down).add_(1)
        t += 0 * x.sum()
    return pack(codes, 2), t


def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
    """Add -t, 0 or t."""
    codes, t = unpack(parts[0], 2, into.numel()), parts[1]
    add_pieces(into, weight, lambda piece: codes[piece].to(t.dtype).sub_(1).mul_(t))
