"""Global top-k: pairs of workers add up what they hold and keep the k largest, up a tree.

What travels stays k entries however many workers there are, where a gather of each worker's top-k
grows with them.

References:
    Shi et al., `A distributed synchronous SGD algorithm with global top-k sparsification for low
    bandwidth networks <https://arxiv.org/abs/1901.04359>`_, 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit.residual import plus, zeros
from shoal.axes.compression.kit.select import largest, largest_entries
from shoal.axes.compression.kit.sparse import (
    Parts,
    add_at,
    check_ratio,
    message,
    places,
    share,
    spread,
)
from shoal.flow import Agreed, Flow, Fold, Merge
from shoal.notation import typed


def gtopk(ratio: float) -> Compressor:
    """Agree on the ``ratio`` largest entries of the sum, merged pairwise; keep what was left out.

    Args:
        ratio: share of the entries that is agreed on, in (0, 1]; at least one entry.

    Example: ``gtopk(0.25)``.

    Differs from the paper: what a merge leaves out returns to the residual of the rank that merged,
    which holds it; in the paper each worker looks up what became of its own. So nothing is lost,
    also where two workers sent the same entry, and nothing more travels.
    """
    check_ratio("gtopk", ratio)

    def init(value: Value) -> tuple[Tensor]:
        return (zeros(value.tensor),)

    def flow(value: Value, state: tuple[Tensor], round: int) -> Flow:
        wanted, row = plus(value.tensor, state[0])
        numel = row.numel()
        where, values = largest_entries(row, share(ratio, numel))
        told = yield Fold(message(where, values, numel), merging(numel))
        mine = spread(where, values, value.tensor)
        for taken_back, amount in told.dropped:  # I merged, so what is left out is mine to keep
            add_at(taken_back, amount, mine, -1.0)
        mean = torch.zeros_like(value.tensor)
        add_at(places(told.parts, numel), told.parts[1], mean, 1 / told.workers)
        return Agreed(mean, mine, (wanted.sub_(mine),))

    traits = Trait.MERGES | Trait.CONSERVING | Trait.SLICEABLE
    return Compressor(f"gtopk({typed(ratio)})", traits, flow, init)


def merging(numel: int) -> Merge:
    """How two messages about ``numel`` entries become one as long: the largest of their sum."""

    def merge(mine: Parts, theirs: Parts) -> tuple[Parts, Parts]:
        k = mine[1].numel()
        both = torch.cat([places(mine, numel), places(theirs, numel)])
        where, at = torch.unique(both, return_inverse=True)  # ascending
        total = mine[1].new_zeros(where.numel())
        total.index_add_(0, at, torch.cat([mine[1], theirs[1]]))
        kept = torch.zeros_like(where, dtype=torch.bool)
        kept[largest(total, k)] = True
        return message(where[kept], total[kept], numel), (where[~kept], total[~kept])

    return merge
