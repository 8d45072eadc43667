"""A summation service: workers send what they would sum, and get what all say together.

The k-th ask of every worker is one round. Contributions are added in the order of workers, so that
the answer is the same on every run.
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

Spec = list[Any]


def describe(ask: Ask) -> tuple[Spec, list[Tensor]]:
    """An ask as JSON, and its tensors in order."""
    match ask:
        case Mean(tensor):
            return ["mean"], [tensor]
        case Gather(parts, _, like):
            kind = str(like.dtype).removeprefix("torch.")
            return ["gather", len(parts), kind, list(like.shape)], list(parts)
        case All(asks):
            described = [describe(one) for one in asks]
            return ["all", [spec for spec, _ in described]], [t for _, ts in described for t in ts]
        case _:
            raise UsageError(f"a server answers Mean, Gather and All, not {type(ask).__name__}")


def answer(spec: Spec, said: Sequence[list[Tensor]], add: Add) -> list[Tensor]:
    """What all say together; consumes the tensors it reads from each list."""
    weight = 1 / len(said)
    if spec[0] == "mean":
        total = said[0].pop(0).clone()
        for tensors in said[1:]:
            total += tensors.pop(0)
        return [total.div_(len(said))]
    if spec[0] == "gather":
        into = torch.zeros(spec[3], dtype=DTYPES[spec[2]])
        for tensors in said:
            add(tuple(tensors.pop(0) for _ in range(int(spec[1]))), into, weight)
        return [into]
    return [tensor for part in spec[1] for tensor in answer(part, said, add)]


class ReduceService:
    """Rounds that close when every worker has spoken.

    Args:
        workers: how many take part.
        add: how a message adds up.
        seconds: how long a round may take.
    """

    def __init__(self, workers: int, add: Add, *, seconds: float | None = None) -> None:
        self._workers = workers
        self._add = add
        self._changed = threading.Condition()
        self._said: dict[int, dict[int, list[Tensor]]] = {}
        self._answers: dict[int, tuple[list[Tensor], set[int]]] = {}
        self._seconds = seconds
        self._gone: dict[int, str] = {}
        self._fault: FaultError | None = None

    def offer(self, worker: int, round: int, spec: Spec, tensors: list[Tensor]) -> list[Tensor]:
        """Say my part and wait for the answer."""
        with self._changed:
            said = self._said.setdefault(round, {})
            said[worker] = tensors
            if len(said) == self._workers:
                self._close(round, spec)
            self._changed.wait_for(lambda: self._over(round), self._seconds)
            if not self._over(round):
                missing = ", ".join(str(w) for w in range(self._workers) if w not in said)
                waited = f"the server waited {self._seconds:g} s for rank {missing}"
                self._fault = ExchangeTimeout(f"{waited} in its round {round}")
                self._changed.notify_all()
            if round not in self._answers:
                raise self._why(round)
            told, taken = self._answers[round]
            taken.add(worker)
            if len(taken) == self._workers:
                del self._answers[round]
            return told

    def _close(self, round: int, spec: Spec) -> None:
        said = self._said[round]
        try:
            told = answer(spec, [said[w] for w in sorted(said)], self._add)
            self._answers[round] = (told, set())
            del self._said[round]
        except (RuntimeError, IndexError) as error:
            self._fault = LayoutMismatch(f"what workers sent does not add up: {error}")
        self._changed.notify_all()

    def _over(self, round: int) -> bool:
        waits = round not in self._answers and self._fault is None
        return not (waits and all(w in self._said[round] for w in self._gone))

    def _why(self, round: int) -> FaultError:
        if self._fault is not None:
            return self._fault
        absent = next(w for w in self._gone if w not in self._said[round])
        return PeerLost(f"rank {absent} {self._gone[absent]}, and the server waits for it")

    def lose(self, worker: int, how: str = "is gone") -> None:
        """A worker died or left: whoever waits for it learns so."""
        with self._changed:
            self._gone[worker] = how
            self._changed.notify_all()
