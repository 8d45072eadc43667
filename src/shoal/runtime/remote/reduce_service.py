"""The server for bsp: each worker sends a contribution, and all receive the mean.

The k-th contribution of every worker belongs to round k. Contributions are added in the order of
the ranks, so that the result does not depend on the order of arrival.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ExchangeTimeout, FaultError, LayoutMismatch, PeerLost, UsageError
from shoal.flow import Add, All, Ask, Gather, Mean
from shoal.wire.channel import DTYPES

Spec = list[Any]  # tells in JSON how to combine the workers' tensors; see describe


def describe(ask: Ask) -> tuple[Spec, list[Tensor]]:
    """Return a JSON list that says how to combine an ask's tensors, and the tensors in order."""
    match ask:
        case Mean(tensor):
            return ["mean"], [tensor]
        case Gather(parts, _, like):
            dtype = str(like.dtype).removeprefix("torch.")
            return ["gather", len(parts), dtype, list(like.shape)], list(parts)
        case All(asks):
            described = [describe(one) for one in asks]
            return ["all", [spec for spec, _ in described]], [t for _, ts in described for t in ts]
        case _:
            raise UsageError(f"a server answers Mean, Gather and All, not {type(ask).__name__}")


def answer(spec: Spec, contributions: Sequence[list[Tensor]], add: Add) -> list[Tensor]:
    """Return the mean of the workers' contributions, and remove the used tensors from them."""
    workers = len(contributions)
    if spec[0] == "mean":
        total = contributions[0].pop(0).clone()
        for tensors in contributions[1:]:
            total += tensors.pop(0)
        return [total.div_(workers)]
    if spec[0] == "gather":
        mean = torch.zeros(spec[3], dtype=DTYPES[spec[2]])
        for tensors in contributions:
            add(tuple(tensors.pop(0) for _ in range(int(spec[1]))), mean, 1 / workers)
        return [mean]
    return [tensor for part in spec[1] for tensor in answer(part, contributions, add)]


class ReduceService:
    """Answers each round when every worker has sent its contribution.

    ``add`` is the compressor's function that decodes a message and adds it to a tensor. A round
    that takes longer than ``seconds`` fails with an ExchangeTimeout.
    """

    def __init__(self, workers: int, add: Add, *, seconds: float | None = None) -> None:
        self._workers, self._add, self._seconds = workers, add, seconds
        self._changed = threading.Condition()
        self._contributions: dict[int, dict[int, list[Tensor]]] = {}  # round -> worker -> tensors
        self._answers: dict[int, tuple[list[Tensor], set[int]]] = {}  # round -> (result, readers)
        self._lost: dict[int, str] = {}  # worker -> why it is lost
        self._fault: FaultError | None = None

    def offer(self, worker: int, round: int, spec: Spec, tensors: list[Tensor]) -> list[Tensor]:
        """Add a worker's contribution to a round, wait for the others, and return the mean."""
        with self._changed:
            contributions = self._contributions.setdefault(round, {})
            contributions[worker] = tensors
            if len(contributions) == self._workers:
                self._compute(round, spec)
            self._changed.wait_for(lambda: self._over(round), self._seconds)
            if not self._over(round):
                missing = ", ".join(str(w) for w in range(self._workers) if w not in contributions)
                waited = f"the server waited {self._seconds:g} s for rank {missing}"
                self._fault = ExchangeTimeout(f"{waited} in its round {round}")
                self._changed.notify_all()
            if round not in self._answers:
                if self._fault is not None:
                    raise self._fault
                absent = next(w for w in self._lost if w not in contributions)
                raise PeerLost(f"rank {absent} {self._lost[absent]}, but the server needs its data")
            result, receivers = self._answers[round]
            receivers.add(worker)
            if len(receivers) == self._workers:
                del self._answers[round]
            return result

    def _compute(self, round: int, spec: Spec) -> None:
        contributions = self._contributions[round]
        try:
            result = answer(spec, [contributions[w] for w in sorted(contributions)], self._add)
            self._answers[round] = (result, set())
            del self._contributions[round]
        except (RuntimeError, IndexError) as error:
            self._fault = LayoutMismatch(f"the server cannot add the workers' tensors: {error}")
        self._changed.notify_all()

    def _over(self, round: int) -> bool:
        """Whether a round has its answer, or can never have one."""
        waits = round not in self._answers and self._fault is None
        return not (waits and all(w in self._contributions[round] for w in self._lost))

    def lose(self, worker: int, why: str = "is lost") -> None:
        """Record that a worker died or left, so that all rounds that wait for it fail."""
        with self._changed:
            self._lost[worker] = why
            self._changed.notify_all()
