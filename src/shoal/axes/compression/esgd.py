"""eSGD: entries that proved important go first; what is late gathers momentum.

References:
    Tao & Li, `eSGD: communication efficient distributed deep learning on the edge
    <https://www.usenix.org/conference/hotedge18/presentation/tao>`_, 2018.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit.residual import plus, zeros
from shoal.axes.compression.kit.select import largest
from shoal.axes.compression.kit.sparse import add, check_momentum, check_ratio, flat, send, share
from shoal.flow import Agreed, Flow
from shoal.notation import typed


def esgd(ratio: float, momentum: float = 0.9) -> Compressor:
    """Send half by how often an entry was a hit, half by how large it has grown.

    An entry that was sent is a hit if all workers' mean has the sign of mine, and is forgotten as
    important if not. It keeps residual and momentum itself: the optimizer has none.

    Args:
        ratio: share of the entries that is sent, in (0, 1]; at least one entry.
        momentum: of the residual, in [0, 1).

    Example: ``esgd(0.25)``, ``esgd(0.1, 0.5)``.

    Differs from the paper: there all that was sent is a hit if the loss fell, which no compressor
    sees, and entries that are no hits are drawn at random.
    """
    check_ratio("esgd", ratio)
    check_momentum("esgd", momentum)

    def init(value: Value) -> tuple[Tensor, Tensor, Tensor]:
        hits = torch.zeros(value.tensor.numel(), dtype=torch.int32, device=value.tensor.device)
        return zeros(value.tensor), zeros(value.tensor), hits

    def flow(value: Value, state: tuple[Tensor, Tensor, Tensor], round: int) -> Flow:
        v, u, hits = state
        u, us = plus(value.tensor, u, momentum)
        v, vs = plus(u, v)
        where = important(vs, hits, share(ratio, vs.numel()))
        mean, mine = yield from send(where, vs[where], value.tensor)
        agreed = flat(mean)[where].sign() == vs[where].sign()
        hits = hits.index_put((where,), torch.where(agreed, hits[where] + 1, 0).int())
        vs.index_fill_(0, where, 0)
        us.index_fill_(0, where, 0)
        return Agreed(mean, mine, (v, u, hits))

    told = "" if momentum == 0.9 else f", {typed(momentum)}"
    traits = Trait.CONSERVING | Trait.MOMENTUM | Trait.SLICEABLE | Trait.ONE_SHOT
    return Compressor(f"esgd({typed(ratio)}{told})", traits, flow, init, add)


def important(row: Tensor, hits: Tensor, k: int) -> Tensor:
    """k places, ascending: half those hit most often, the larger first; then the largest."""
    if k == 0:
        return largest(row, k)
    size = row.abs().float()
    size /= size.max().clamp_min(torch.finfo(torch.float32).tiny)  # in [0, 1]
    most = largest(hits + size / 2, k // 2)
    return largest(size.index_add_(0, most, torch.ones_like(size[most]), alpha=2), k)
