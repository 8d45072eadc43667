"""Which entries to send: the largest, found exactly, but not by ordering all of them.

A sample tells a bound that little lies above, one pass finds what does, and only that is ordered.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAMPLE = 2**14
PIECE = 2**19  # entries
FOLDS = 8
SIGMAS = 4.0  # so far below its estimate lies the bound: once in 30,000 rounds it is too high


def largest(row: Tensor, k: int) -> Tensor:
    """The places of the k entries largest in magnitude, ascending; a NaN counts as largest."""
    return largest_entries(row, k)[0]


def largest_entries(row: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The places of the k largest, and what is there: read while it was in the cache."""
    n = row.numel()
    if k >= n:
        return torch.arange(n, device=row.device), row.clone()
    if n > 2 * SAMPLE and 16 * k <= n:
        near, values = _not_below(row, _bound(row, k))
        if near.numel() >= k:  # or else the sample was not like the rest
            best = _largest(values.abs(), k)
            return near[best], values[best]
    where = _largest(row.abs(), k).nonzero().squeeze(1)
    return where, row[where]


def _largest(size: Tensor, k: int) -> Tensor:
    """True at the k largest: places in a mask need no sorting."""
    best = torch.zeros(size.numel(), dtype=torch.bool, device=size.device)
    best[size.topk(k, sorted=False).indices] = True
    return best


def _not_below(row: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Places, ascending, and values of entries not below in magnitude; a NaN never is.

    Piece by piece, in memory that stays in the cache; and folded, so that of most entries only the
    largest of several is compared.
    """
    memory = row.new_empty(min(PIECE, row.numel()))
    found = []
    for index, piece in enumerate(torch.split(row, PIECE)):
        torch.abs(piece, out=memory[: piece.numel()])
        size = memory[: piece.numel()].view(1 if piece.numel() % FOLDS else FOLDS, -1)
        columns = (size.amax(0) < bound).logical_not_().nonzero().squeeze(1)
        near = piece.view(size.shape).index_select(1, columns).view(-1)  # (folds * columns,)
        hits = (near.abs() < bound).logical_not_().nonzero().squeeze(1)
        fold = torch.div(hits, max(1, columns.numel()), rounding_mode="floor")
        places = columns[hits - fold * columns.numel()].add_(fold, alpha=size.shape[1])
        found.append((places.add_(index * PIECE), near[hits]))
    where, values = zip(*found, strict=True)
    return torch.cat(where), torch.cat(values)


def _bound(row: Tensor, k: int) -> float:
    """A magnitude that most likely more than k entries reach, and not many more."""
    step = row.numel() // SAMPLE | 1  # odd: rows are often as long as a power of two
    sample = row[::step].abs()
    expected = sample.numel() * k / row.numel()
    rank = min(sample.numel(), math.ceil(expected + SIGMAS * math.sqrt(expected) + SIGMAS))
    return float(sample.topk(rank).values[-1])
