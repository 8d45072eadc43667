"""Flows: an algorithm yields asks, and a wire sends back the answers.

An algorithm never sees a process group, so the same code runs on gloo, NCCL, a parameter server,
neighbours in a graph, the simulator and a unit test. The answer to an ask does not depend on the
wire: it combines the messages of all workers that take part.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from shoal.errors import UsageError

Add: TypeAlias = Callable[[tuple[Tensor, ...], Tensor, float], None]
"""``add(parts, into, weight)`` decodes a message: ``into += weight * decoded parts``.

It changes nothing but ``into``, so a worker, a server or an intermediate hop can run it."""

Merge: TypeAlias = Callable[
    [tuple[Tensor, ...], tuple[Tensor, ...]], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
]
"""``merge(own, other)`` returns the merged parts, and the parts that were left out."""


class Sent(Protocol):
    """What this worker's message contained after any loss: :class:`Gather`, or :class:`Dense`."""

    def dense(self) -> Tensor:
        """Return it as a tensor, shaped like the value that was sent."""

    def subtract_from(self, tensor: Tensor) -> None:
        """Subtract it in place from a contiguous tensor, if possible without a dense copy."""


class Dense(NamedTuple):
    """What was sent, as a tensor."""

    tensor: Tensor

    def dense(self) -> Tensor:
        """Return the tensor itself."""
        return self.tensor

    def subtract_from(self, tensor: Tensor) -> None:
        """Subtract it in place."""
        tensor.sub_(self.tensor)


class Mean(NamedTuple):
    """Ask for the weighted mean over all workers. The wire may overwrite ``tensor``."""

    tensor: Tensor


class Scatter(NamedTuple):
    """Ask for the first half of a mean (reduce-scatter), in place: each worker gets one part.

    The answer is the tensor to pass to :class:`Spread`.
    """

    tensor: Tensor


class Spread(NamedTuple):
    """Ask for the second half of a mean (all-gather), in place: each worker gets all parts."""

    tensor: Tensor


class Gather(NamedTuple):
    """Ask for the weighted mean of messages that cannot be summed as they are.

    Parts have the same sizes on every worker. The wire does not overwrite them, so the ask itself
    can serve as ``Agreed.mine``.
    """

    parts: tuple[Tensor, ...]
    add: Add
    like: Tensor

    def dense(self) -> Tensor:
        """Decode this worker's own message."""
        into = torch.zeros_like(self.like)
        self.add(self.parts, into, 1.0)
        return into

    def subtract_from(self, tensor: Tensor) -> None:
        """Subtract this worker's own message from a tensor, decoded piece by piece."""
        self.add(self.parts, tensor, -1.0)


class Rows(NamedTuple):
    """Ask for the weighted mean of sparse tensors; each worker may hold different rows."""

    tensor: Tensor


class Fold(NamedTuple):
    """Ask to merge messages pairwise along a tree (gTop-k); the answer is a :class:`Folded`.

    ``merge(own, other)`` returns merged parts of the same sizes, and the entries it left out, which
    stay with the worker that merged. It is pure. Parts have the same sizes on every worker.
    """

    parts: tuple[Tensor, ...]
    merge: Merge


class Folded(NamedTuple):
    """The merged parts, equal on all workers, and what this worker's own merges left out."""

    parts: tuple[Tensor, ...]
    dropped: tuple[tuple[Tensor, ...], ...]
    workers: int


class Pair(NamedTuple):
    """Ask one peer to move to the mean of both models, and for that mean (AD-PSGD)."""

    peer: int
    parts: tuple[Tensor, ...]


class Push(NamedTuple):
    """Send one message per parameter to the servers, and ask for their current model."""

    parts: dict[str, tuple[Tensor, ...]]


class All(NamedTuple):
    """Several asks in one message; the answer is the tuple of their answers."""

    asks: tuple[Ask, ...]


Ask: TypeAlias = "Mean | Scatter | Spread | Gather | Rows | Fold | Pair | Push | All"


class Agreed(NamedTuple):
    """The result of a flow.

    Args:
        mean: the agreed tensor, equal on all workers.
        mine: what this worker's own message contained. Unless nothing is lost, it shares no
            memory with the value that was sent, so that ``mine.subtract_from(value)`` is safe.
        state: what the compressor remembers until the next round.
    """

    mean: Tensor
    mine: Sent
    state: Any


Result = TypeVar("Result")
Flow: TypeAlias = Generator[Ask, Any, Agreed]
Asks: TypeAlias = Generator[Ask, Any, None]
"""A flow that leaves its result in place and returns nothing."""


def drive(flow: Generator[Ask, Any, Result], answer: Callable[[Ask], Any]) -> Result:
    """Run a flow to its end, answering each ask immediately, and return its result."""
    try:
        ask = next(flow)
        while True:
            ask = flow.send(answer(ask))
    except StopIteration as end:
        result: Result = end.value
        return result


def through(
    flow: Generator[Ask, Any, Result], answer: Callable[[Ask], Generator[Ask, Any, Any]]
) -> Generator[Ask, Any, Result]:
    """Run a flow inside another one, which replaces each ask by the flow ``answer(ask)``."""
    reply: Any = None
    while True:
        try:
            ask = flow.send(reply)
        except StopIteration as end:
            result: Result = end.value
            return result
        reply = yield from answer(ask)


def alone(ask: Ask) -> Any:
    """Return the answer to an ask when this worker takes part alone: its own message, decoded."""
    match ask:
        case Mean(tensor) | Rows(tensor) | Scatter(tensor) | Spread(tensor):
            return tensor
        case Gather():
            return ask.dense()
        case Fold(parts, _):
            return Folded(parts, dropped=(), workers=1)
        case All(asks):
            return tuple(alone(one) for one in asks)
        case _:
            name = type(ask).__name__
            raise UsageError(f"{name} needs a peer or a server: one worker has neither")


def tree(workers: int) -> list[tuple[int, int]]:
    """Return the merges of a binomial tree in order, as (receiver, sender); worker 0 ends with all.

    Works for any number of workers, in ``ceil(log2 workers)`` rounds.
    """
    merges, distance = [], 1
    while distance < workers:
        merges += [(i, i + distance) for i in range(0, workers - distance, 2 * distance)]
        distance *= 2
    return merges


def nbytes(ask: Ask) -> int:
    """Return the bytes of the message of an ask, whatever its route; half for half a mean."""
    match ask:
        case Mean(tensor):
            return tensor.nbytes
        case Scatter(tensor) | Spread(tensor):
            return tensor.nbytes // 2
        case Rows(tensor):
            return tensor._indices().nbytes + tensor._values().nbytes
        case Gather(parts=parts) | Pair(parts=parts) | Fold(parts=parts):
            return sum(part.nbytes for part in parts)
        case Push(messages):
            return sum(part.nbytes for message in messages.values() for part in message)
        case All(asks):
            return sum(map(nbytes, asks))


def together(flows: Iterable[Flow]) -> Generator[Ask, Any, list[Agreed]]:
    """Run flows in lockstep: their i-th asks travel as one message.

    A flow with fewer asks than the others ends earlier.
    """
    running = list(flows)
    ends: dict[int, Agreed] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(running)))
    while answers:
        asks: dict[int, Ask] = {}
        for index, answer in answers.items():
            try:
                asks[index] = running[index].send(answer)
            except StopIteration as end:
                ends[index] = end.value
        replies = (yield All(tuple(asks.values()))) if asks else ()
        answers = dict(zip(asks, replies, strict=True))
    return [ends[index] for index in range(len(running))]
