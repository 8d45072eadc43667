"""Random-k sparsification: all workers send the same entries, drawn anew every round.

Everybody draws the same places, so values can be summed where they are, by any route, and no place
travels.

References:
    Wangni et al., `Gradient sparsification for communication-efficient distributed optimization
    <https://arxiv.org/abs/1710.09854>`_, 2018.
    Stich et al., `Sparsified SGD with memory <https://arxiv.org/abs/1809.07599>`_, 2018.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit.residual import plus, zeros
from shoal.axes.compression.kit.sparse import check_ratio, flat, share, spread
from shoal.errors import BadArgument
from shoal.flow import Agreed, Ask, Flow, Mean
from shoal.notation import typed


def random_k(ratio: float, seed: int = 0) -> Compressor:
    """Send a random share of the entries, the same on all workers, scaled to be right on average.

    Alone it is scaled by d / k, so unbiased; in ``error_feedback``, which corrects what was not
    sent, it is not scaled.

    Args:
        ratio: share of the entries that is sent, in (0, 1]; at least one entry.
        seed: with the round and the parameter's name, decides which entries are sent.

    Example: ``random_k(0.25)``, ``random_k(0.5, seed=1)``.
    """
    check_ratio("random_k", ratio)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise BadArgument(f"random_k({ratio}, seed={seed})", "seed must be a whole number")
    name = f"random_k({typed(ratio)}{f', seed={seed}' if seed else ''})"

    def places(row: Tensor, value: Value, round: int) -> Tensor:
        told = f"{seed}/{round}/{value.name}"
        return drawn(share(ratio, row.numel()), row.numel(), told).to(row.device)

    def flow(value: Value, state: None, round: int) -> Flow:
        row = flat(value.tensor)  # (numel,)
        where = places(row, value, round)  # (k,)
        scale = row.numel() / max(1, where.numel())
        mean, mine = yield from _sum(row[where] * scale, where, value.tensor)
        return Agreed(mean, mine, state=None)

    def init(value: Value) -> tuple[Tensor, None]:
        return zeros(value.tensor), None

    def fed(value: Value, state: tuple[Tensor, None], round: int) -> Flow:
        wanted, row = plus(value.tensor, state[0])
        where = places(row, value, round)
        mean, mine = yield from _sum(row[where], where, value.tensor)
        row.index_fill_(0, where, 0)
        return Agreed(mean, mine, (wanted, None))

    shared = Trait.SLICEABLE | Trait.SUMS
    conserving = shared | Trait.CONTRACTIVE | Trait.CONSERVING
    feedback = Compressor(f"error_feedback({name})", conserving, fed, init)
    return Compressor(name, shared | Trait.UNBIASED, flow, feedback=feedback)


def drawn(k: int, numel: int, told: str) -> Tensor:
    """k different places among ``numel``, ascending, any k as likely; a function of what is told.

    Of few among many, too many are drawn, equal ones are thrown out, and k of the rest are chosen:
    ordering all places at random would cost a hundred times more.
    """
    chance = torch.Generator().manual_seed(zlib.crc32(told.encode()))
    if 8 * k > numel:
        return torch.randperm(numel, generator=chance)[:k].sort().values
    count, found = k + k // 8 + 8, torch.empty(0, dtype=torch.int64)
    while found.numel() < k:
        found = torch.unique(torch.randint(numel, (count,), generator=chance))  # ascending
        count *= 2
    chosen = torch.zeros(found.numel(), dtype=torch.bool)
    chosen[torch.randperm(found.numel(), generator=chance)[:k]] = True
    return found[chosen]


def _sum(
    values: Tensor, where: Tensor, like: Tensor
) -> Generator[Ask, Any, tuple[Tensor, Callable[[], Tensor]]]:
    mine = values.clone()  # the wire may write over the others
    total = yield Mean(values)
    return spread(where, total, like), lambda: spread(where, mine, like)
