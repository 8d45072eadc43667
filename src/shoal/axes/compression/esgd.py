"""eSGD: send entries whose sign agreed with the mean in earlier rounds, and the largest others.

References:
    Tao & Li, `eSGD: communication efficient distributed deep learning on the edge
    <https://www.usenix.org/conference/hotedge18/presentation/tao>`_, 2018.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit.residual import add_residual, zeros
from shoal.axes.compression.kit.select import top_k
from shoal.axes.compression.kit.sparse import add, check_ratio, send, share
from shoal.flow import Agreed, Flow
from shoal.notation import check_momentum, typed


def esgd(ratio: float, momentum: float = 0.9) -> Compressor:
    """Send a share of the entries, half by hit count, half by magnitude; send the others later.

    A sent entry is a hit if its mean over all workers has the same sign as on this worker. A hit
    increases the hit count of the entry by 1. If a sent entry is no hit, its count becomes 0. What
    is not sent stays in a residual with momentum, so the optimizer must have no momentum.

    Args:
        ratio: share of the entries to send, in (0, 1]; at least one entry is sent.
        momentum: factor of the previous momentum, in [0, 1).

    Example: ``esgd(0.25)``, ``esgd(0.1, 0.5)``.

    Differs from the paper: in the paper, all sent entries are hits if the loss has decreased, but a
    compressor does not know the loss. The paper draws the entries without a hit at random.
    """
    check_ratio("esgd", ratio)
    check_momentum("esgd", momentum)

    def init(value: Value) -> tuple[Tensor, Tensor, Tensor]:
        hits = torch.zeros(value.tensor.numel(), dtype=torch.int32, device=value.tensor.device)
        return zeros(value.tensor), zeros(value.tensor), hits

    def flow(value: Value, state: tuple[Tensor, Tensor, Tensor], round: int) -> Flow:
        v, u, hits = state
        u = add_residual(value.tensor, u, momentum)
        v = add_residual(u, v)
        row = v.view(-1)
        where = important(row, hits, share(ratio, row.numel()))
        mean, mine = yield from send(where, row[where], value.tensor)
        agreed = mean.reshape(-1)[where].sign() == row[where].sign()
        hits = hits.index_put((where,), torch.where(agreed, hits[where] + 1, 0).int())
        row.index_fill_(0, where, 0)
        u.view(-1).index_fill_(0, where, 0)
        return Agreed(mean, mine, (v, u, hits))

    option = "" if momentum == 0.9 else f", {typed(momentum)}"
    traits = Trait.CONSERVING | Trait.MOMENTUM | Trait.SLICEABLE | Trait.ONE_SHOT
    return Compressor(f"esgd({typed(ratio)}{option})", traits, flow, init, add)


def important(row: Tensor, hits: Tensor, k: int) -> Tensor:
    """Return k indices, ascending: the k // 2 with the most hits, and the largest of the others.

    Of entries with equally many hits, those of larger magnitude come first.
    """
    if k == 0:
        return top_k(row, k)[0]
    score = row.abs().float()
    score /= score.max().clamp_min(torch.finfo(torch.float32).tiny)  # in [0, 1]
    most_hits, _ = top_k(hits + score / 2, k // 2)
    return top_k(score.index_add_(0, most_hits, torch.ones_like(score[most_hits]), alpha=2), k)[0]
