"""Run the flows of n workers in one process, without threads.

These two steps are repeated until the flows end:

1. Every flow runs to its next ask.
2. Every worker's answer is computed from the asks of all workers.

Worker processes run the same flows, so lockstep returns the same results as they do, up to the
order of summation.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from shoal.axes.coordination.coordination import complete
from shoal.flow import All, Ask, Fold, Folded, Gather, Mean, Scatter, Spread, tree

Result = TypeVar("Result")


def lockstep(
    flows: Sequence[Generator[Ask, Any, Result]],
    mixing: Tensor | None = None,
    *,
    once: bool = False,
) -> list[Result]:
    """Run one flow of each worker to its end, and return their results in the order of workers.

    Args:
        flows: one for each worker. All must yield asks of the same types in the same order.
        mixing: row i has the weights for worker i's answers. None means equal weights.
        once: compute an answer only once and give each worker a copy, unless workers may get
            different answers (``mixing`` or Fold). If False, each worker's answer is computed.
    """
    w = complete(len(flows), 0) if mixing is None else mixing
    answers: list[Any] = [None] * len(flows)
    while True:
        asks: list[Ask] = []
        ends: list[Result] = []
        for flow, reply in zip(flows, answers, strict=True):
            try:
                asks.append(flow.send(reply))
            except StopIteration as end:
                ends.append(end.value)
        if not asks:
            return ends
        if ends:
            raise AssertionError(f"{len(ends)} workers ended, but {len(asks)} yielded another ask")
        if once and mixing is None and not any(isinstance(a, Fold) for a in _leaves(asks[0])):
            shared = answer(asks, w[0], 0)
            answers = [_copy(shared) for _ in flows]
        else:
            answers = [answer(asks, row, rank) for rank, row in enumerate(w)]


def _leaves(ask: Ask) -> Sequence[Ask]:
    return [leaf for part in ask.asks for leaf in _leaves(part)] if isinstance(ask, All) else (ask,)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else tuple(map(_copy, value))


def answer(asks: Sequence[Any], row: Tensor, rank: int) -> Any:
    """Return the answer that worker ``rank`` receives, given one ask from each worker.

    ``row`` has the weights of the workers.
    """
    kinds = {type(ask) for ask in asks}
    if len(kinds) != 1:
        raise AssertionError(f"workers yield different asks: {sorted(k.__name__ for k in kinds)}")
    weights = [float(weight) for weight in row]
    match asks[0]:
        case Mean(tensor) | Scatter(tensor) | Spread(tensor):
            # after Scatter a worker needs only its part, but the whole mean contains that part
            total = torch.zeros_like(tensor)
            for ask, weight in zip(asks, weights, strict=True):
                total.add_(ask.tensor, alpha=weight)
            return total
        case Gather(_, add, like):
            into = torch.zeros_like(like)
            for ask, weight in zip(asks, weights, strict=True):
                add(ask.parts, into, weight)
            return into
        case All():
            columns = zip(*(ask.asks for ask in asks), strict=True)
            return tuple(answer(column, row, rank) for column in columns)
        case Fold():
            return _folded(asks, rank)
        case first:
            raise AssertionError(f"lockstep cannot answer {first!r}")


def _folded(asks: Sequence[Fold], rank: int) -> Folded:
    """Return the answer that ``rank`` receives. ``dropped`` has what its own merges left out."""
    parts = [ask.parts for ask in asks]
    dropped = []
    for receiver, sender in tree(len(asks)):
        parts[receiver], left_out = asks[receiver].merge(parts[receiver], parts[sender])
        if receiver == rank:
            dropped.append(left_out)
    return Folded(parts[0], tuple(dropped), len(asks))
