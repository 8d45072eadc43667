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

from shoal.errors import PeerLost
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
            raise PeerLost(f"a server does not answer {type(ask).__name__}")


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


class Summation:
    """Rounds that close when every worker has spoken.

    Args:
        workers: how many take part.
        add: how a message adds up.
    """

    def __init__(self, workers: int, add: Add) -> None:
        self._workers = workers
        self._add = add
        self._changed = threading.Condition()
        self._said: dict[int, dict[int, list[Tensor]]] = {}
        self._answers: dict[int, tuple[list[Tensor], set[int]]] = {}
        self._lost: PeerLost | None = None

    def offer(self, worker: int, round: int, spec: Spec, tensors: list[Tensor]) -> list[Tensor]:
        """Say my part and wait for the answer."""
        with self._changed:
            said = self._said.setdefault(round, {})
            said[worker] = tensors
            if len(said) == self._workers:
                in_order = [said[w] for w in sorted(said)]
                self._answers[round] = (answer(spec, in_order, self._add), set())
                del self._said[round]
                self._changed.notify_all()
            self._changed.wait_for(lambda: round in self._answers or self._lost is not None)
            if round not in self._answers:
                raise self._lost or PeerLost("a worker is gone")
            told, taken = self._answers[round]
            taken.add(worker)
            if len(taken) == self._workers:
                del self._answers[round]
            return told

    def lose(self, worker: int) -> None:
        """A worker died: whoever waits for it learns so."""
        with self._changed:
            self._lost = PeerLost(f"rank {worker} is gone, and the server waits for it")
            self._changed.notify_all()
