"""MXNet's 2-bit compression: send a threshold or its negative when a residual has reached it.

References:
    Apache MXNet, `Gradient compression
    <https://mxnet.apache.org/api/faq/gradient_compression>`_, 2018.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit.bit_packing import pack, unpack
from shoal.axes.compression.kit.blocks import add_pieces, pieces, wide
from shoal.axes.compression.kit.residual import add_residual, one_residual
from shoal.errors import BadArgument
from shoal.flow import Agreed, Flow, Gather
from shoal.notation import is_number, typed


def twobit(threshold: float) -> Compressor:
    """Send -threshold, 0 or +threshold for each number. The rest is kept and sent later.

    A message has 2 bits per number, and the threshold. The compressor keeps a residual, so it needs
    no ``error_feedback``. A round sends at most one threshold per number. If the threshold is far
    below the gradients, the residual grows. If it is far above them, numbers are sent late.

    Args:
        threshold: the magnitude that is sent, > 0; choose the magnitude of the larger gradients.

    Example: ``twobit(0.05)``.
    """
    if not (is_number(threshold) and 0 < threshold < math.inf):
        raise BadArgument(f"twobit({threshold})", "threshold must be > 0, for example twobit(0.01)")

    def flow(value: Value, state: tuple[Tensor], round: int) -> Flow:
        v = add_residual(value.tensor, state[0])
        ask = Gather(encode(v.view(-1), threshold), add, like=value.tensor)
        mean = yield ask
        ask.subtract_from(v)
        return Agreed(mean, ask, (v,))

    traits = Trait.CONSERVING | Trait.SLICEABLE | Trait.ONE_SHOT
    return Compressor(f"twobit({typed(threshold)})", traits, flow, one_residual, add, width=2)


def encode(flat: Tensor, threshold: float) -> tuple[Tensor, ...]:
    """Return codes 0, 1, 2 for -t, 0, t, four in a byte, and t (NaN if a number is not finite)."""
    codes = flat.new_empty(flat.numel(), dtype=torch.int8)
    t = flat.new_full((1,), threshold, dtype=wide(flat.dtype))
    for piece in pieces(flat.numel()):
        x = flat[piece].to(t.dtype)
        up, down = torch.empty_like(x), torch.empty_like(x)  # float is far faster than bool
        torch.ge(x, threshold, out=up)
        torch.le(x, -threshold, out=down)
        codes[piece] = up.sub_(down).add_(1)
        t += 0 * x.sum()
    return pack(codes, 2), t


def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
    """Add ``weight`` times a message to ``into``: -t, 0 or t for each number."""
    codes, t = unpack(parts[0], 2, into.numel()), parts[1]
    add_pieces(into, weight, lambda piece: codes[piece].to(t.dtype).sub_(1).mul_(t))
