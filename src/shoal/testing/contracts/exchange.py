"""Run rounds of a compressor among n simulated workers, and record asks and results."""

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
    """The shape and dtype of a value, and the number of workers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    workers: int

    def gradients(self, seed: int = 0) -> list[Tensor]:
        """Return one random gradient per worker. Equal seeds give equal gradients."""
        chance = torch.Generator().manual_seed(1000 * seed + self.workers)
        draws = torch.randn(self.workers, *self.shape, generator=chance, dtype=torch.float64)
        return [draw.to(self.dtype) for draw in draws]


CASES = tuple(
    Case(shape, dtype, workers)
    for shape in SHAPES
    for dtype in DTYPES
    for workers in ((1, 2, 3, 4) if dtype == torch.float64 else (2, 3))
)


class RecordedRound(NamedTuple):
    """The results of a round, and the asks of each worker."""

    ends: list[Agreed]
    asks: list[list[Ask]]  # a worker's asks, in order

    @property
    def states(self) -> list[Any]:
        """Return each worker's state for the next round."""
        return [end.state for end in self.ends]

    @property
    def tolerance(self) -> float:
        """Return the tolerance for a short sum, 16 eps of the coarsest dtype sent or returned."""
        types = {end.mean.dtype for end in self.ends}
        types |= {t.dtype for asks in self.asks for ask in asks for t in tensors(ask)}
        return 16 * max(torch.finfo(t).eps for t in types if t.is_floating_point)


def tensors(ask: Ask) -> tuple[Tensor, ...]:
    """Return the tensors of an ask."""
    match ask:
        case Mean(tensor):
            return (tensor,)
        case Gather(parts=parts) | Fold(parts=parts):
            return parts
        case _:
            raise AssertionError(f"a compressor must not ask for {type(ask).__name__}")


def starts(compressor: Compressor, gradients: Sequence[Tensor]) -> list[Any]:
    """Return every worker's state before the first round."""
    return [compressor.init(Value(g, "weight")) for g in gradients]


def exchange(
    compressor: Compressor,
    gradients: Sequence[Tensor],
    *,
    states: Sequence[Any] | None = None,
    round: int = 0,
    overwrites: bool = False,
) -> RecordedRound:
    """Run one round. With ``overwrites``, tensors of Means and gradients may be overwritten."""
    before = starts(compressor, gradients) if states is None else states
    values = [Value(g, "weight", out=g if overwrites else None) for g in gradients]
    asks: list[list[Ask]] = [[] for _ in gradients]
    flows = [
        _watched(compressor.flow(value, state, round), seen, overwrites)
        for value, state, seen in zip(values, before, asks, strict=True)
    ]
    return RecordedRound(lockstep(flows), asks)


def rounds(
    compressor: Compressor, case: Case, count: int = 3, *, copies: bool = True
) -> Iterator[tuple[list[Tensor], RecordedRound]]:
    """Yield the gradients and the record of each round. In odd rounds the wire overwrites asks.

    With ``copies``, each round gets a copy of the states, so that all states can be compared later.
    Otherwise a round gets the states of the previous round themselves, as in training.
    """
    states = starts(compressor, case.gradients())
    for round in range(count):
        gradients = case.gradients(round)
        inputs = [g.clone() for g in gradients]
        one = exchange(compressor, inputs, states=states, round=round, overwrites=round % 2 == 1)
        states = copy.deepcopy(one.states) if copies else one.states
        yield gradients, one


def _watched(flow: Flow, seen: list[Ask], overwrites: bool) -> Flow:
    def answer(ask: Ask) -> Generator[Ask, Any, Any]:
        seen.append(ask)
        reply = yield ask
        if overwrites and isinstance(ask, Mean):
            return ask.tensor.copy_(reply)
        return reply

    return through(flow, answer)
