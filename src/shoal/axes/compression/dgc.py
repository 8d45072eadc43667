"""Deep gradient compression: each worker adds up its momentum in a residual, and sends its top k.

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

WARMUP_FACTOR = 0.25  # the first density of a warm-up; each next phase multiplies the density by it


def dgc(
    ratio: float, momentum: float = 0.9, *, clip: float = math.inf, warmup: int = 0
) -> Compressor:
    """Send the largest entries of an accumulated momentum; keep the others and send them later.

    In the letters of the paper: the momentum is u = m u + g, and the residual is v = v + u. The
    entries of v with the largest magnitudes are sent. At the sent entries, u and v become 0
    (momentum factor masking). The compressor applies momentum, so the optimizer must have none.

    Args:
        ratio: share of the entries to send, in (0, 1]; at least one entry is sent.
        momentum: m, in [0, 1).
        clip: largest L2 norm of a worker's gradient tensor; with a larger norm, it is scaled down.
        warmup: number of rounds at each of the densities 25 %, 6.25 %, ... before ``ratio``.

    Example: ``dgc(0.25)``, ``dgc(0.1, 0.5, clip=1.0, warmup=2)``.

    Differs from the paper: ``clip`` bounds the norm of each tensor on each worker. The paper bounds
    the norm of the whole gradient, by ``clip`` over the square root of the number of workers.
    """
    check_ratio("dgc", ratio)
    check_momentum("dgc", momentum)
    if not (is_number(clip) and clip > 0):
        raise BadArgument(f"dgc(clip={clip})", "clip must be positive")
    if not is_whole(warmup, 0):
        raise BadArgument(f"dgc(warmup={warmup})", "warmup must be a whole number of rounds >= 0")

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
        u.view(-1).index_fill_(0, where, 0)  # otherwise their old momentum would enter v again
        return Agreed(mean, mine, (v, u))

    arguments = [typed(ratio)] + [typed(momentum)] * (momentum != 0.9)
    arguments += [f"clip={typed(clip)}"] * (clip < math.inf) + [f"warmup={warmup}"] * (warmup > 0)
    traits = Trait.CONSERVING | Trait.MOMENTUM | Trait.SLICEABLE | Trait.ONE_SHOT
    return Compressor(f"dgc({', '.join(arguments)})", traits, flow, init, add)


def density(ratio: float, warmup: int, round: int) -> float:
    """Return the share of the entries to send in a round.

    Without a warm-up it is ``ratio``. With one it is 1/4 in the first ``warmup`` rounds, a quarter
    of that in the next ``warmup`` rounds, and so on, but never less than ``ratio``.
    """
    return max(ratio, WARMUP_FACTOR ** (1 + round // warmup)) if warmup else ratio


def clipped(gradient: Tensor, max_norm: float) -> Tensor:
    """Return the gradient, scaled so that its L2 norm is at most ``max_norm``."""
    if math.isinf(max_norm):
        return gradient
    norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    return gradient * (max_norm / max(norm, max_norm))
