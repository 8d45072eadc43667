"""Find the k entries of the largest magnitude, exactly, without sorting all of them.

1. Estimate from a sample a bound that a few more than k entries reach.
2. Collect all entries that reach the bound, in one pass.
3. Take the top k of these. If fewer than k reached the bound, take the top k of all entries.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAMPLE = 2**14
PIECE = 2**19  # entries
FOLDS = 8
SIGMAS = 4.0  # the bound lies so far below its estimate: it is too high once in 30,000 rounds


def top_k(row: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the indices, ascending, and the values of the k entries largest in magnitude.

    A NaN counts as the largest.
    """
    n = row.numel()
    if k >= n:
        return torch.arange(n, device=row.device), row.clone()
    if n > 2 * SAMPLE and 16 * k <= n:
        near, values = _not_below(row, _bound(row, k))
        if near.numel() >= k:  # else the sample was not representative
            best = _top_mask(values.abs(), k)
            return near[best], values[best]
    where = _top_mask(row.abs(), k).nonzero().squeeze(1)
    return where, row[where]


def _bound(row: Tensor, k: int) -> float:
    """Return a magnitude that very likely at least k entries reach, and not many more."""
    step = row.numel() // SAMPLE | 1  # odd, because the length of rows is often a power of two
    sample = row[::step].abs()
    expected = sample.numel() * k / row.numel()
    rank = min(sample.numel(), math.ceil(expected + SIGMAS * math.sqrt(expected) + SIGMAS))
    return float(sample.topk(rank).values[-1])


def _not_below(row: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Return indices, ascending, and values of entries whose magnitude is not below the bound.

    Works piece by piece, so that memory stays in the cache. A piece is folded into (FOLDS, n) and
    its columns' maxima are compared first, so that most entries are never compared one by one.
    """
    memory = row.new_empty(min(PIECE, row.numel()))
    indices, values = [], []
    for number, piece in enumerate(torch.split(row, PIECE)):
        torch.abs(piece, out=memory[: piece.numel()])
        size = memory[: piece.numel()].view(1 if piece.numel() % FOLDS else FOLDS, -1)
        columns = (size.amax(0) < bound).logical_not_().nonzero().squeeze(1)  # NaN is not below
        near = piece.view(size.shape).index_select(1, columns).view(-1)  # (folds * columns,)
        hits = (near.abs() < bound).logical_not_().nonzero().squeeze(1)
        fold = torch.div(hits, max(1, columns.numel()), rounding_mode="floor")
        places = columns[hits - fold * columns.numel()].add_(fold, alpha=size.shape[1])
        indices.append(places.add_(number * PIECE))
        values.append(near[hits])
    return torch.cat(indices), torch.cat(values)


def _top_mask(size: Tensor, k: int) -> Tensor:
    """Return a mask of the k largest: reading indices off a mask needs no sorting."""
    mask = torch.zeros(size.numel(), dtype=torch.bool, device=size.device)
    mask[size.topk(k, sorted=False).indices] = True
    return mask
