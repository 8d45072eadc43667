"""Global top-k: pairs of workers add up their entries and keep the k largest, up a tree.

A message always has k entries, however many workers there are; a gather of each worker's top-k
grows with their number.

References:
    Shi et al., `A distributed synchronous SGD algorithm with global top-k sparsification for low
    bandwidth networks <https://arxiv.org/abs/1901.04359>`_, 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit import sparse
from shoal.axes.compression.kit.residual import add_residual, one_residual
from shoal.axes.compression.kit.select import top_k
from shoal.flow import Agreed, Dense, Flow, Fold, Merge
from shoal.notation import typed


def gtopk(ratio: float) -> Compressor:
    """Agree on the ``ratio`` largest entries of the sum, merged in pairs; the rest is sent later.

    Args:
        ratio: share of the entries that is agreed on, in (0, 1]; at least one entry.

    Example: ``gtopk(0.25)``.

    Differs from the paper: entries that a merge leaves out go to the residual of the rank that
    merged, which holds them; in the paper each worker looks up what became of its own entries. So
    nothing is lost, even if two workers sent the same entry, and no further message is needed.
    """
    sparse.check_ratio("gtopk", ratio)

    def flow(value: Value, state: tuple[Tensor], round: int) -> Flow:
        v = add_residual(value.tensor, state[0])
        numel = v.numel()
        where, values = top_k(v.view(-1), sparse.share(ratio, numel))
        result = yield Fold(sparse.message(where, values, numel), merging(numel))
        mine = sparse.spread(where, values, value.tensor)
        for indices, amounts in result.dropped:  # this rank merged, so it keeps what was left out
            sparse.add_at(indices, amounts, mine, -1.0)
        mean = torch.zeros_like(value.tensor)
        sparse.add_at(sparse.places(result.parts, numel), result.parts[1], mean, 1 / result.workers)
        return Agreed(mean, Dense(mine), (v.sub_(mine),))

    traits = Trait.MERGES | Trait.CONSERVING | Trait.SLICEABLE
    return Compressor(f"gtopk({typed(ratio)})", traits, flow, one_residual)


def merging(numel: int) -> Merge:
    """Return the function that merges two messages of k entries into the k largest of their sum."""

    def merge(own: sparse.Parts, other: sparse.Parts) -> tuple[sparse.Parts, sparse.Parts]:
        k = own[1].numel()
        both = torch.cat([sparse.places(own, numel), sparse.places(other, numel)])
        where, at = torch.unique(both, return_inverse=True)  # ascending
        total = own[1].new_zeros(where.numel())
        total.index_add_(0, at, torch.cat([own[1], other[1]]))
        stays = torch.zeros_like(where, dtype=torch.bool)
        stays[top_k(total, k)[0]] = True
        return sparse.message(where[stays], total[stays], numel), (where[~stays], total[~stays])

    return merge
