"""Global top-k: workers merge their top k entries pairwise along a tree, to the k largest sums.

Every message has k entries, for any number of workers. If instead the top k of all workers were
gathered, the bytes that a worker receives would grow with the number of workers.

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
    """Add up the largest entries of pairs of workers and keep the largest sums; send others later.

    Args:
        ratio: share of the entries in a message, in (0, 1]; at least one entry is sent.

    Example: ``gtopk(0.25)``.

    Differs from the paper: sums that a merge leaves out are added to the residual of the worker
    that merged. In the paper each worker keeps those of its own entries that are not in the result.
    Here nothing is lost, even if two workers sent the same entry.
    """
    sparse.check_ratio("gtopk", ratio)

    def flow(value: Value, state: tuple[Tensor], round: int) -> Flow:
        v = add_residual(value.tensor, state[0])
        numel = v.numel()
        where, values = top_k(v.view(-1), sparse.share(ratio, numel))
        result = yield Fold(sparse.message(where, values, numel), make_merge(numel))
        mine = sparse.to_dense(where, values, value.tensor)
        for indices, amounts in result.dropped:  # not sent, as this worker's merges dropped them
            sparse.add_at(indices, amounts, mine, -1.0)
        mean = torch.zeros_like(value.tensor)
        indices = sparse.decode_indices(result.parts, numel)
        sparse.add_at(indices, result.parts[1], mean, 1 / result.workers)
        return Agreed(mean, Dense(mine), (v.sub_(mine),))

    traits = Trait.MERGES | Trait.CONSERVING | Trait.SLICEABLE
    return Compressor(f"gtopk({typed(ratio)})", traits, flow, one_residual)


def make_merge(numel: int) -> Merge:
    """Return a function that merges two messages of k entries.

    It returns the message of the k largest sums, and the (indices, values) that it left out.
    """

    def merge(own: sparse.Parts, other: sparse.Parts) -> tuple[sparse.Parts, sparse.Parts]:
        k = own[1].numel()
        both = torch.cat([sparse.decode_indices(own, numel), sparse.decode_indices(other, numel)])
        where, inverse = torch.unique(both, return_inverse=True)  # ascending
        sums = own[1].new_zeros(where.numel())
        sums.index_add_(0, inverse, torch.cat([own[1], other[1]]))
        stays = torch.zeros_like(where, dtype=torch.bool)
        stays[top_k(sums, k)[0]] = True
        return sparse.message(where[stays], sums[stays], numel), (where[~stays], sums[~stays])

    return merge
