"""One round of a compressor among n workers, watched: what was asked, and what came of it."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.axes.compression import Compressor, Value
from shoal.flow import Agreed, Ask, Flow, Fold, Gather, Mean, through
from shoal.testing.lockstep import lockstep

SHAPES = ((), (1,), (7,), (0,), (0, 3), (5, 6), (8, 9), (4, 3, 2, 2))
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


class Case(NamedTuple):
    """What is agreed on, and by how many."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    workers: int

    def gradients(self, seed: int = 0) -> list[Tensor]:
        """One a worker, the same every time."""
        chance = torch.Generator().manual_seed(1000 * seed + self.workers)
        draws = torch.randn(self.workers, *self.shape, generator=chance, dtype=torch.float64)
        return [draw.to(self.dtype) for draw in draws]


CASES = tuple(
    Case(shape, dtype, workers)
    for shape in SHAPES
    for dtype in DTYPES
    for workers in ((1, 2, 3, 4) if dtype == torch.float64 else (2, 3))
)


class Round(NamedTuple):
    """What a round gave each worker, and what it asked for."""

    ends: list[Agreed]
    asks: list[list[Ask]]  # a worker's asks, in order

    @property
    def states(self) -> list[Any]:
        """What each keeps for the next round."""
        return [end.state for end in self.ends]

    @property
    def tolerance(self) -> float:
        """What the coarsest type that travelled, or came out, rounds off in a sum of few."""
        types = {end.mean.dtype for end in self.ends}
        types |= {t.dtype for asks in self.asks for ask in asks for t in tensors(ask)}
        return 16 * max(torch.finfo(t).eps for t in types if t.is_floating_point)


def tensors(ask: Ask) -> tuple[Tensor, ...]:
    """What travels."""
    match ask:
        case Mean(tensor):
            return (tensor,)
        case Gather(parts=parts) | Fold(parts=parts):
            return parts
        case _:
            raise AssertionError(f"a compressor does not ask {type(ask).__name__}")


def starts(compressor: Compressor, gradients: Sequence[Tensor]) -> list[Any]:
    """Every worker's state before the first round."""
    return [compressor.init(Value(g, "weight")) for g in gradients]


def exchange(
    compressor: Compressor,
    gradients: Sequence[Tensor],
    *,
    states: Sequence[Any] | None = None,
    round: int = 0,
    overwrites: bool = False,
) -> Round:
    """Run one round; with ``overwrites`` answers go where questions, and gradients, were."""
    held = starts(compressor, gradients) if states is None else states
    asks: list[list[Ask]] = [[] for _ in gradients]
    flows = [
        _watched(compressor.flow(_value(g, overwrites), state, round), seen, overwrites)
        for g, state, seen in zip(gradients, held, asks, strict=True)
    ]
    return Round(lockstep(flows), asks)


def _value(gradient: Tensor, overwrites: bool) -> Value:
    return Value(gradient, "weight", out=gradient if overwrites else None)


def rounds(
    compressor: Compressor, case: Case, count: int = 3, *, copies: bool = True
) -> Iterator[tuple[list[Tensor], Round]]:
    """Several rounds on, each with the gradients that went in; wires of both kinds in turn.

    With ``copies`` each round has a state of its own, so that those of all may be looked at later;
    without, it is handed on, as in training.
    """
    states = starts(compressor, case.gradients())
    for round in range(count):
        gradients = case.gradients(round)
        given = [g.clone() for g in gradients]
        one = exchange(compressor, given, states=states, round=round, overwrites=round % 2 == 1)
        states = copy.deepcopy(one.states) if copies else one.states
        yield gradients, one


def _watched(flow: Flow, seen: list[Ask], overwrites: bool) -> Flow:
    def answer(ask: Ask) -> Generator[Ask, Any, Any]:
        seen.append(ask)
        told = yield ask
        if overwrites and isinstance(ask, Mean):
            return ask.tensor.copy_(told)
        return told

    return through(flow, answer)
