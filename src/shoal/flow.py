"""The language of agreement: an algorithm asks (yields), a wire answers (sends).

An algorithm never sees a process group, so one text serves gloo, NCCL, a server, neighbours in a
graph, the simulator and a unit test. The answer to an ask is always the same kind of thing, whoever
answers: what the workers taking part say *together*.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from shoal.errors import UsageError

Add: TypeAlias = Callable[[tuple[Tensor, ...], Tensor, float], None]
"""``add(parts, into, weight)``: into += weight * what the parts say. Pure but for ``into``, so a
worker, a server or a hop on the way can run it."""

Merge: TypeAlias = Callable[
    [tuple[Tensor, ...], tuple[Tensor, ...]], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
]
"""``merge(mine, theirs)``: what goes on, and what was left out."""


class Mean(NamedTuple):
    """Ask for the weighted mean over those taking part. The wire may overwrite ``tensor``."""

    tensor: Tensor


class Scatter(NamedTuple):
    """Ask for the first half of a mean, in place: each worker ends with a part of it.

    The answer is the tensor, to be given to :class:`Spread`.
    """

    tensor: Tensor


class Spread(NamedTuple):
    """Ask for the other half, in place: everybody's parts for everybody."""

    tensor: Tensor


class Gather(NamedTuple):
    """Ask for the weighted mean of messages that cannot be summed as they are.

    Every worker's parts have the same sizes.
    """

    parts: tuple[Tensor, ...]
    add: Add
    like: Tensor


class Rows(NamedTuple):
    """Ask for the weighted mean of sparse tensors; everyone may hold other rows."""

    tensor: Tensor


class Fold(NamedTuple):
    """Ask to merge pairwise along a tree (gTop-k); the answer is a :class:`Folded`.

    ``merge(mine, theirs)`` gives what goes on, sized as either was, and what it left out, which
    stays with whoever merged. Pure. Every worker's parts have the same sizes.
    """

    parts: tuple[Tensor, ...]
    merge: Merge


class Folded(NamedTuple):
    """What all workers' parts became, the same for all, and what my own merges left out."""

    parts: tuple[Tensor, ...]
    dropped: tuple[tuple[Tensor, ...], ...]
    workers: int


class Pair(NamedTuple):
    """Ask one peer to move to our common mean, and for that mean (AD-PSGD)."""

    peer: int
    parts: tuple[Tensor, ...]


class Push(NamedTuple):
    """Give a server one message a parameter, and ask what its model is now."""

    parts: dict[str, tuple[Tensor, ...]]


class All(NamedTuple):
    """Several asks in one message; the answer is the tuple of their answers."""

    asks: tuple[Ask, ...]


Ask: TypeAlias = "Mean | Scatter | Spread | Gather | Rows | Fold | Pair | Push | All"


class Agreed(NamedTuple):
    """What a flow ends with: what all said, what my own message said after loss, what to keep.

    Who loses nothing need not keep ``own`` apart from a tensor that the wire overwrites. Few ever
    ask for it, so where it takes a pass over all numbers it is a function that makes it.
    """

    mean: Tensor
    own: Tensor | Callable[[], Tensor]
    state: Any

    @property
    def mine(self) -> Tensor:
        """What my own message said."""
        return self.own if isinstance(self.own, Tensor) else self.own()


Result = TypeVar("Result")
Flow: TypeAlias = Generator[Ask, Any, Agreed]
Asks: TypeAlias = Generator[Ask, Any, None]
"""A flow that leaves its result in place and returns nothing."""


def drive(flow: Generator[Ask, Any, Result], answer: Callable[[Ask], Any]) -> Result:
    """Run a flow to its end, answering every ask at once."""
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
    """Run a flow inside another: each of its asks is answered by what ``answer`` asks in turn."""
    told: Any = None
    while True:
        try:
            ask = flow.send(told)
        except StopIteration as end:
            result: Result = end.value
            return result
        told = yield from answer(ask)


def alone(ask: Ask) -> Any:
    """What a worker is told when nobody else takes part: its own message, as it would arrive."""
    match ask:
        case Mean(tensor) | Rows(tensor) | Scatter(tensor) | Spread(tensor):
            return tensor
        case Gather(parts, add, like):
            into = torch.zeros_like(like)
            add(parts, into, 1.0)
            return into
        case Fold(parts, _):
            return Folded(parts, dropped=(), workers=1)
        case All(asks):
            return tuple(alone(one) for one in asks)
        case _:
            raise UsageError(f"one worker has nobody to answer {type(ask).__name__}")


def tree(workers: int) -> list[tuple[int, int]]:
    """Who merges whose message, in order, until worker 0 has merged all: (taker, giver).

    Any number of workers; as many rounds as it has binary digits.
    """
    merges, apart = [], 1
    while apart < workers:
        merges += [(i, i + apart) for i in range(0, workers - apart, 2 * apart)]
        apart *= 2
    return merges


def nbytes(ask: Ask) -> int:
    """Bytes of the message that an ask sends, whatever its route; of a half of one, half of it."""
    if isinstance(ask, All):
        return sum(map(nbytes, ask.asks))
    whole = sum(t.numel() * t.element_size() for t in _tensors(ask))
    return whole // 2 if isinstance(ask, Scatter | Spread) else whole


def _tensors(ask: Ask) -> list[Tensor]:
    match ask:
        case Mean(tensor) | Scatter(tensor) | Spread(tensor):
            return [tensor]
        case Rows(tensor):
            return [tensor._indices(), tensor._values()]
        case Gather(parts=parts) | Pair(parts=parts) | Fold(parts=parts):
            return list(parts)
        case Push(parts):
            return [tensor for message in parts.values() for tensor in message]
        case All(asks):
            return [tensor for one in asks for tensor in _tensors(one)]


def together(flows: Iterable[Flow]) -> Generator[Ask, Any, list[Agreed]]:
    """Run flows in step: their i-th asks travel as one message.

    A flow with fewer asks than its neighbours simply drops out early.
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
