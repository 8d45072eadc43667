"""Flows: generators that yield requests for communication (asks) and are sent the answers.

A flow never uses a process group itself. A wire, which does the communication, answers its asks. So
the same flow runs on gloo, NCCL, a parameter server, neighbours in a graph, and in one process in a
unit test. On every wire, the mean that answers an ask is computed from the messages of all workers
that take part.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from shoal.errors import UsageError

Add: TypeAlias = Callable[[tuple[Tensor, ...], Tensor, float], None]
"""``add(parts, into, weight)`` decodes a message and adds it: ``into += weight * decoded parts``.

It modifies only ``into``, in place, so any receiver of the message can run it."""

Merge: TypeAlias = Callable[
    [tuple[Tensor, ...], tuple[Tensor, ...]], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
]
"""``merge(own, other)`` returns the merged parts, and the parts that the merge left out."""


class Sent(Protocol):
    """The decoded content of this worker's own message, which may have lost precision."""

    def dense(self) -> Tensor:
        """Return the content as a tensor with the shape of the value that was sent."""

    def subtract_from(self, tensor: Tensor) -> None:
        """Subtract the content from a contiguous tensor, in place."""


class Dense(NamedTuple):
    """The content of a message as a plain tensor."""

    tensor: Tensor

    def dense(self) -> Tensor:
        """Return the tensor itself."""
        return self.tensor

    def subtract_from(self, tensor: Tensor) -> None:
        """Subtract the content from ``tensor``, in place."""
        tensor.sub_(self.tensor)


class Mean(NamedTuple):
    """Ask for the weighted mean over all workers. The wire may overwrite ``tensor``."""

    tensor: Tensor


class Scatter(NamedTuple):
    """Ask for a reduce-scatter, in place: afterwards each worker holds one part of the mean.

    The answer is the tensor to pass to :class:`Spread`.
    """

    tensor: Tensor


class Spread(NamedTuple):
    """Ask for an all-gather of the parts of :class:`Scatter`, in place; the answer is the mean."""

    tensor: Tensor


class Gather(NamedTuple):
    """Ask for the weighted mean of encoded messages, which must be decoded before they are summed.

    ``parts`` are the tensors of this worker's message; they have the same sizes on every worker.
    ``add`` decodes a message, and ``like`` has the shape of the answer. The wire does not overwrite
    the parts, so this object can also be used as ``Agreed.mine``.
    """

    parts: tuple[Tensor, ...]
    add: Add
    like: Tensor

    def dense(self) -> Tensor:
        """Return this worker's own message, decoded into a new tensor."""
        into = torch.zeros_like(self.like)
        self.add(self.parts, into, 1.0)
        return into

    def subtract_from(self, tensor: Tensor) -> None:
        """Subtract this worker's own decoded message from ``tensor``, in place."""
        self.add(self.parts, tensor, -1.0)


class Rows(NamedTuple):
    """Ask for the weighted mean of sparse tensors; each worker may have different rows."""

    tensor: Tensor


class Fold(NamedTuple):
    """Ask to merge messages pairwise along a tree (gTop-k); the answer is a :class:`Folded`.

    ``merge(own, other)`` returns merged parts of the same sizes, and the entries that it left out.
    These entries stay on the worker that ran the merge. ``merge`` does not modify its arguments.
    ``parts`` have the same sizes on every worker.
    """

    parts: tuple[Tensor, ...]
    merge: Merge


class Folded(NamedTuple):
    """The parts merged over all workers, and the parts that each merge on this worker left out."""

    parts: tuple[Tensor, ...]
    dropped: tuple[tuple[Tensor, ...], ...]
    workers: int


class Pair(NamedTuple):
    """Ask one peer to replace its model by the mean of both models, and to return it (AD-PSGD)."""

    peer: int
    parts: tuple[Tensor, ...]


class Push(NamedTuple):
    """Send one message per parameter to the servers, and ask for their current model."""

    parts: dict[str, tuple[Tensor, ...]]


class All(NamedTuple):
    """Several asks that are sent as one message; the answer is the tuple of their answers."""

    asks: tuple[Ask, ...]


Ask: TypeAlias = "Mean | Scatter | Spread | Gather | Rows | Fold | Pair | Push | All"


class Agreed(NamedTuple):
    """The result of a compressor's flow.

    Args:
        mean: the mean of the decoded messages. If it is over all workers, it is equal on all.
        mine: the decoded content of this worker's own message. If the compressor is lossy, it
            shares no memory with the value that was sent, so ``mine.subtract_from(value)`` is safe.
        state: the compressor's state for the next round.
    """

    mean: Tensor
    mine: Sent
    state: Any


Result = TypeVar("Result")
Flow: TypeAlias = Generator[Ask, Any, Agreed]
Asks: TypeAlias = Generator[Ask, Any, None]
"""A flow that writes its result into existing tensors and returns nothing."""


def drive(flow: Generator[Ask, Any, Result], answer: Callable[[Ask], Any]) -> Result:
    """Run a flow to its end, send it ``answer(ask)`` for each ask, and return its result."""
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
    """Return a flow that runs ``flow`` and answers each of its asks by the flow ``answer(ask)``."""
    reply: Any = None
    while True:
        try:
            ask = flow.send(reply)
        except StopIteration as end:
            result: Result = end.value
            return result
        reply = yield from answer(ask)


def alone(ask: Ask) -> Any:
    """Return the answer to an ask if there is only one worker: its own message, decoded.

    Raises UsageError for :class:`Pair` and :class:`Push`, which need another process.
    """
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
            raise UsageError(f"{name} needs a peer or a server; start at least two workers")


def tree(workers: int) -> list[tuple[int, int]]:
    """Return the merges of a binomial tree with root 0, as (receiver, sender) pairs in order.

    It works for any number of workers, and has ``ceil(log2 workers)`` rounds.
    """
    merges, distance = [], 1
    while distance < workers:
        merges += [(i, i + distance) for i in range(0, workers - distance, 2 * distance)]
        distance *= 2
    return merges


def nbytes(ask: Ask) -> int:
    """Return the bytes of this worker's message. A Scatter or a Spread counts as half a Mean."""
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
    """Return one flow that runs several flows in lockstep and returns their results, in order.

    The i-th asks of all flows are sent as one message. A flow with fewer asks ends earlier.
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
