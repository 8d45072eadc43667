"""n workers in one process, without threads: flows advance together, asks are answered together.

The harness and the processes run the same flows, so what holds here to the last bit holds there up
to the order of a sum.
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
    """Run one flow a worker to the end; every ask is answered from all workers' asks.

    Args:
        flows: one a worker; all must ask the same kinds of things in the same order.
        mixing: worker i is answered with row i of this matrix; None is the plain mean.
        once: work out what all are told alike once, and hand out copies; else each worker decodes
            every message itself, as it would in a process, which with many is most of the time.
    """
    w = complete(len(flows), 0) if mixing is None else mixing
    answers: list[Any] = [None] * len(flows)
    while True:
        asks: list[Ask] = []
        ends: list[Result] = []
        for flow, told in zip(flows, answers, strict=True):
            try:
                asks.append(flow.send(told))
            except StopIteration as end:
                ends.append(end.value)
        if not asks:
            return ends
        if ends:
            raise AssertionError(f"{len(ends)} workers ended while {len(asks)} still ask")
        if once and mixing is None and not any(isinstance(a, Fold) for a in _each(asks[0])):
            told = answer(asks, w[0], 0)
            answers = [_copy(told) for _ in flows]
        else:
            answers = [answer(asks, row, me) for me, row in enumerate(w)]


def _each(ask: Ask) -> Sequence[Ask]:
    return [one for each in ask.asks for one in _each(each)] if isinstance(ask, All) else (ask,)


def _copy(told: Any) -> Any:
    return told.clone() if isinstance(told, Tensor) else tuple(map(_copy, told))


def answer(asks: Sequence[Any], row: Tensor, me: int) -> Any:
    """What one worker is told when all have asked."""
    kinds = {type(ask) for ask in asks}
    if len(kinds) != 1:
        raise AssertionError(f"workers ask different things: {sorted(k.__name__ for k in kinds)}")
    weights = [float(weight) for weight in row]
    match asks[0]:
        case Mean(tensor) | Scatter(tensor) | Spread(tensor):  # of equal parts the mean is a part
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
            return tuple(answer(column, row, me) for column in columns)
        case Fold():
            return _folded(asks, me)
        case first:
            raise AssertionError(f"lockstep cannot answer {first!r}")


def _folded(asks: Sequence[Fold], me: int) -> Folded:
    """Merged as processes would: what one left out, nobody else is told."""
    held = [ask.parts for ask in asks]
    dropped = []
    for taker, giver in tree(len(asks)):
        held[taker], out = asks[taker].merge(held[taker], held[giver])
        if taker == me:
            dropped.append(out)
    return Folded(held[0], tuple(dropped), len(asks))
