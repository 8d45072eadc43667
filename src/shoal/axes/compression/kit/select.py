"""Find the k entries of the largest magnitude, exactly, without sorting all of them.

1. Estimate from a sample a bound that slightly more than k entries reach.
2. Collect all entries that reach the bound, in one pass.
3. Return the top k of these. If fewer than k reach the bound, return the top k of all entries.

For a short tensor or a large k, steps 1 and 2 are left out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAMPLE = 2**14  # entries
PIECE = 2**19  # entries
FOLDS = 8
SIGMAS = 4.0  # safety margin: fewer than k entries reach the bound in about 1 of 30,000 rounds


def top_k(row: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the indices, ascending, and the values of the k entries of largest magnitude.

    NaN counts as larger than any number.
    """
    n = row.numel()
    if k >= n:
        return torch.arange(n, device=row.device), row.clone()
    if n > 2 * SAMPLE and 16 * k <= n:
        indices, values = _not_below(row, _bound(row, k))
        if indices.numel() >= k:  # otherwise the bound was too high
            best = _top_mask(values.abs(), k)
            return indices[best], values[best]
    where = _top_mask(row.abs(), k).nonzero().squeeze(1)
    return where, row[where]


def _bound(row: Tensor, k: int) -> float:
    """Return a magnitude that most likely k entries or slightly more reach."""
    # An even step would sample only a few columns of a matrix whose width is a power of two.
    step = row.numel() // SAMPLE | 1
    sample = row[::step].abs()
    expected = sample.numel() * k / row.numel()
    sample_k = min(sample.numel(), math.ceil(expected + SIGMAS * math.sqrt(expected) + SIGMAS))
    return float(sample.topk(sample_k).values[-1])


def _not_below(row: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Return indices, ascending, and values of entries whose magnitude is not below the bound.

    The tensor is processed in pieces that fit the cache. A piece is viewed as (FOLDS, n). Only
    columns whose maximum reaches the bound are searched, so most entries need no comparison.
    """
    abs_buffer = row.new_empty(min(PIECE, row.numel()))
    indices, values = [], []
    for number, piece in enumerate(torch.split(row, PIECE)):
        torch.abs(piece, out=abs_buffer[: piece.numel()])
        magnitudes = abs_buffer[: piece.numel()].view(1 if piece.numel() % FOLDS else FOLDS, -1)
        # ``not <`` in place of ``>=``, so that NaN is included.
        columns = (magnitudes.amax(0) < bound).logical_not_().nonzero().squeeze(1)
        candidates = piece.view(magnitudes.shape).index_select(1, columns).view(-1)
        hits = (candidates.abs() < bound).logical_not_().nonzero().squeeze(1)
        fold = torch.div(hits, max(1, columns.numel()), rounding_mode="floor")
        places = columns[hits - fold * columns.numel()].add_(fold, alpha=magnitudes.shape[1])
        indices.append(places.add_(number * PIECE))
        values.append(candidates[hits])
    return torch.cat(indices), torch.cat(values)


def _top_mask(magnitudes: Tensor, k: int) -> Tensor:
    """Return a boolean mask of the k largest entries. Its nonzero() is ascending without a sort."""
    mask = torch.zeros(magnitudes.numel(), dtype=torch.bool, device=magnitudes.device)
    mask[magnitudes.topk(k, sorted=False).indices] = True
    return mask
