"""Random-k sparsification: all workers send the same entries, drawn at random in each round.

All workers draw the same indices, so indices are not sent, and any all-reduce can sum the values.

References:
    Wangni et al., `Gradient sparsification for communication-efficient distributed optimization
    <https://arxiv.org/abs/1710.09854>`_, 2018.
    Stich et al., `Sparsified SGD with memory <https://arxiv.org/abs/1809.07599>`_, 2018.
"""

from __future__ import annotations

import zlib
from functools import partial

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit.sparse import SparseSent, check_ratio, share, to_dense
from shoal.errors import BadArgument
from shoal.flow import Agreed, Flow, Mean
from shoal.notation import is_whole, typed


def random_k(ratio: float, seed: int = 0) -> Compressor:
    """Send a random share of the entries, the same entries on all workers; drop the rest.

    If k of d entries are sent, the values are multiplied by d / k, which makes them unbiased.
    Inside ``error_feedback``, which sends the other entries later, they are not multiplied.

    Args:
        ratio: share of the entries to send, in (0, 1]; at least one entry is sent.
        seed: the entries of a round depend on this seed, on the round and on the parameter's name.

    Example: ``random_k(0.25)``, ``random_k(0.5, seed=1)``.
    """
    check_ratio("random_k", ratio)
    if not is_whole(seed):
        raise BadArgument(f"random_k({ratio}, seed={seed})", "seed must be a whole number")
    name = f"random_k({typed(ratio)}{f', seed={seed}' if seed else ''})"

    def flow(value: Value, state: None, round: int, *, scales: bool) -> Flow:
        row = value.tensor.reshape(-1)  # (numel,)
        key = f"{seed}/{round}/{value.name}"
        where = draw(share(ratio, row.numel()), row.numel(), key).to(row.device)  # (k,)
        values = row[where]
        if scales:
            values *= row.numel() / max(1, where.numel())
        mine = SparseSent(where, values.clone(), value.tensor)  # the wire may overwrite values
        mean = yield Mean(values)
        return Agreed(to_dense(where, mean, value.tensor), mine, state=None)

    traits = Trait.SLICEABLE | Trait.SUMS
    plain = Compressor(name, traits | Trait.CONTRACTIVE, partial(flow, scales=False))
    unbiased = partial(flow, scales=True)
    return Compressor(name, traits | Trait.UNBIASED, unbiased, contraction=plain)


def draw(k: int, numel: int, key: str) -> Tensor:
    """Return k different random indices below ``numel``, ascending; equal keys give equal indices.

    If k is small, it draws more than k indices, removes duplicates, and chooses k of the rest. A
    random permutation of all indices would take a hundred times longer.
    """
    rng = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    if 8 * k > numel:
        return torch.randperm(numel, generator=rng)[:k].sort().values
    count, different = k + k // 8 + 8, torch.empty(0, dtype=torch.int64)
    while different.numel() < k:
        different = torch.unique(torch.randint(numel, (count,), generator=rng))  # ascending
        count *= 2
    chosen = torch.zeros(different.numel(), dtype=torch.bool)
    chosen[torch.randperm(different.numel(), generator=rng)[:k]] = True
    return different[chosen]
