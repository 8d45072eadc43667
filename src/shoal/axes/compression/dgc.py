"""Deep gradient compression: momentum on each worker, before what is large is picked and sent.

References:
    Lin et al., `Deep gradient compression <https://arxiv.org/abs/1712.01887>`_, 2018.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit.residual import plus, zeros
from shoal.axes.compression.kit.select import largest_entries
from shoal.axes.compression.kit.sparse import add, check_momentum, check_ratio, send, share
from shoal.errors import BadArgument
from shoal.flow import Agreed, Flow
from shoal.notation import is_number, typed

START = 0.25  # density of the first rounds of a warm-up, and its ratio from each to the next


def dgc(
    ratio: float, momentum: float = 0.9, *, clip: float = math.inf, warmup: int = 0
) -> Compressor:
    """Send the largest entries of a residual that gathers velocity, not gradient.

    In the paper's letters: u = m u + g; v = v + u; send v where it is largest; there u = v = 0
    (momentum factor masking). It keeps residual and momentum itself: the optimizer has none.

    Args:
        ratio: share of the entries that is sent, in (0, 1]; at least one entry.
        momentum: m, in [0, 1).
        clip: the longest that a gradient tensor of mine may be; longer ones are scaled down.
        warmup: rounds spent at each of the densities 25 %, 6.25 %, ... on the way to ``ratio``.

    Example: ``dgc(0.25)``, ``dgc(0.1, 0.5, clip=1.0, warmup=2)``.

    Differs from the paper: ``clip`` bounds each tensor and each worker as it says; the paper bounds
    the whole gradient, and divides by the square root of the number of workers.
    """
    check_ratio("dgc", ratio)
    check_momentum("dgc", momentum)
    _check("clip", clip, is_number(clip) and clip > 0, "positive")
    _check("warmup", warmup, isinstance(warmup, int) and warmup >= 0, "a number of rounds")

    def init(value: Value) -> tuple[Tensor, Tensor]:
        return zeros(value.tensor), zeros(value.tensor)

    def flow(value: Value, state: tuple[Tensor, Tensor], round: int) -> Flow:
        v, u = state
        u, us = plus(clipped(value.tensor, clip), u, momentum)
        v, vs = plus(u, v)
        k = share(density(ratio, warmup, round), vs.numel())
        where, values = largest_entries(vs, k)
        mean, mine = yield from send(where, values, value.tensor)
        vs.index_fill_(0, where, 0)
        us.index_fill_(0, where, 0)  # or else what is stale would be sent on and on
        return Agreed(mean, mine, (v, u))

    words = [typed(ratio)] + [typed(momentum)] * (momentum != 0.9)
    words += [f"clip={typed(clip)}"] * (clip < math.inf) + [f"warmup={warmup}"] * (warmup > 0)
    traits = Trait.CONSERVING | Trait.MOMENTUM | Trait.SLICEABLE | Trait.ONE_SHOT
    return Compressor(f"dgc({', '.join(words)})", traits, flow, init, add)


def density(ratio: float, warmup: int, round: int) -> float:
    """What share is sent in a round: a quarter of the share before, down to ``ratio``."""
    return max(ratio, START ** (1 + round // warmup)) if warmup else ratio


def clipped(gradient: Tensor, longest: float) -> Tensor:
    """The gradient, scaled down if it is too long."""
    if math.isinf(longest):
        return gradient
    length = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    return gradient * (longest / max(length, longest))


def _check(word: str, given: object, sound: bool, wanted: str) -> None:
    if isinstance(given, bool) or not sound:
        raise BadArgument(f"dgc({word}={given})", f"{word} must be {wanted}")
