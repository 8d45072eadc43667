"""Gradients that hold only the rows looked up, and travel as such."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shoal import rules
from shoal.flow import Rows
from shoal.strategy import Strategy
from shoal.wire.pending import Wire


def looked_up(model: nn.Module, strategy: Strategy) -> set[int]:
    """The parameters, by identity, of which a step's gradient is some rows."""
    if not rules.can_overlap(strategy) or strategy.coordination.via != "collective":
        return set()
    tables = (nn.Embedding, nn.EmbeddingBag)
    found = [m for m in model.modules() if isinstance(m, tables) and m.sparse]
    return {id(m.weight) for m in found}


def agree_rows(parameters: Iterable[Tensor], wire: Wire) -> None:
    """Put the mean of all workers' rows in the place of mine."""
    for p in parameters:
        grad = p.grad if p.grad is not None else _no_rows(p)
        rows = wire.ask(Rows(grad)).wait()
        p.grad = rows if rows._nnz() else None  # looked up by nobody: not a gradient of zero


def _no_rows(p: Tensor) -> Tensor:
    where = torch.zeros(1, 0, dtype=torch.int64, device=p.device)
    return torch.sparse_coo_tensor(where, p.new_zeros(0, *p.shape[1:]), p.shape)
