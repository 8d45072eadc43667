"""Deep gradient compression: top-k of a residual, with momentum applied on each worker before it.

References:
    Lin et al., `Deep gradient compression <https://arxiv.org/abs/1712.01887>`_, 2018.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit.residual import add_residual, zeros
from shoal.axes.compression.kit.select import top_k
from shoal.axes.compression.kit.sparse import add, check_ratio, send, share
from shoal.errors import BadArgument
from shoal.flow import Agreed, Flow
from shoal.notation import check_momentum, is_number, is_whole, typed

START = 0.25  # density of the first rounds of a warm-up, and the ratio from each to the next


def dgc(
    ratio: float, momentum: float = 0.9, *, clip: float = math.inf, warmup: int = 0
) -> Compressor:
    """Send the ``ratio`` largest entries of a sum of velocities; the rest is kept and sent later.

    In the paper's letters: u = m u + g; v = v + u; send v where it is largest; there u = v = 0
    (momentum factor masking). It keeps residual and momentum itself, so the optimizer must have no
    momentum.

    Args:
        ratio: share of the entries that is sent, in (0, 1]; at least one entry.
        momentum: m, in [0, 1).
        clip: largest norm of a worker's gradient tensor; a longer one is scaled down.
        warmup: rounds spent at each of the densities 25 %, 6.25 %, ... on the way to ``ratio``.

    Example: ``dgc(0.25)``, ``dgc(0.1, 0.5, clip=1.0, warmup=2)``.

    Differs from the paper: ``clip`` bounds the norm of each tensor on each worker; the paper bounds
    that of the whole gradient, and divides by the square root of the number of workers.
    """
    check_ratio("dgc", ratio)
    check_momentum("dgc", momentum)
    if not (is_number(clip) and clip > 0):
        raise BadArgument(f"dgc(clip={clip})", "clip must be positive")
    if not is_whole(warmup, 0):
        raise BadArgument(f"dgc(warmup={warmup})", "warmup must be a number of rounds")

    def init(value: Value) -> tuple[Tensor, Tensor]:
        return zeros(value.tensor), zeros(value.tensor)

    def flow(value: Value, state: tuple[Tensor, Tensor], round: int) -> Flow:
        v, u = state
        u = add_residual(clipped(value.tensor, clip), u, momentum)
        v = add_residual(u, v)
        k = share(density(ratio, warmup, round), v.numel())
        where, values = top_k(v.view(-1), k)
        mean, mine = yield from send(where, values, value.tensor)
        v.view(-1).index_fill_(0, where, 0)
        u.view(-1).index_fill_(0, where, 0)  # or else a stale direction would be sent on and on
        return Agreed(mean, mine, (v, u))

    words = [typed(ratio)] + [typed(momentum)] * (momentum != 0.9)
    words += [f"clip={typed(clip)}"] * (clip < math.inf) + [f"warmup={warmup}"] * (warmup > 0)
    traits = Trait.CONSERVING | Trait.MOMENTUM | Trait.SLICEABLE | Trait.ONE_SHOT
    return Compressor(f"dgc({', '.join(words)})", traits, flow, init, add)


def density(ratio: float, warmup: int, round: int) -> float:
    """Return the share that is sent in a round: a quarter of the one before, down to ``ratio``."""
    return max(ratio, START ** (1 + round // warmup)) if warmup else ratio


def clipped(gradient: Tensor, longest: float) -> Tensor:
    """Return the gradient, scaled down if its norm exceeds ``longest``."""
    if math.isinf(longest):
        return gradient
    length = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    return gradient * (longest / max(length, longest))
