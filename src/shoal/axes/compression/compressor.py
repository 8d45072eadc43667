"""What a compressor is: a name, facts about it, and a flow."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.flow import Add, Ask, Flow, Gather


class Trait(Flag):
    """Facts that rules decide on. Each is tested by the contract suite, not only declared."""

    NONE = 0
    LOSSLESS = auto()  # the mean of what was sent is the mean of what was meant
    UNBIASED = auto()  # so in expectation
    CONTRACTIVE = auto()  # what is lost is shorter than what was meant: error feedback converges
    CONSERVING = auto()  # what was not sent is kept, as the state's first item, and sent later
    SLICEABLE = auto()  # may be applied to any flat piece of a tensor
    ELEMENTWISE = auto()  # acts on each entry alone: a whole bucket may be one value
    ONE_SHOT = auto()  # a single ask, decoded by ``add`` wherever it arrives
    SUMS = auto()  # asks Mean only: a route of sums carries it
    MERGES = auto()  # what all said is not the mean of what each sent: a vote, a pairwise top-k
    UNSCALED = auto()  # says in which direction, not how far: a vote of signs
    MOMENTUM = auto()  # keeps the momentum itself: the optimizer must have none
    TRACKS = auto()  # what is said of a value that stays comes ever closer to it: models may travel
    FACTORS = auto()  # makes use of a linear layer's factors, where the gradient comes with them


class BucketTiming(NamedTuple):
    """Timing feedback for adaptive compressors, filled in by the runtime."""

    bucket: int = 0  # identifies the tensors of the bucket; 0: unknown
    took: tuple[float, float] | None = None  # seconds of its last round: in flows, exposed
    leads: bool = False  # whether this value is the first of its bucket
    label: str = ""  # the bucket's name in the log, on the rank that logs


class Value(NamedTuple):
    """A tensor to agree on, with its shape and the parameter it belongs to.

    ``factors`` are (u, v) with u.T @ v the tensor, where somebody kept them; else None. In ``out``,
    of the same shape, a flow may leave the mean, once it needs the tensor no more: they may be one.
    """

    tensor: Tensor
    name: str = ""
    factors: tuple[Tensor, Tensor] | None = None
    timing: BucketTiming = BucketTiming()
    out: Tensor | None = None

    def with_tensor(self, tensor: Tensor) -> Value:
        """The same parameter in the same bucket, another content."""
        return Value(tensor, self.name, timing=self.timing)

    def copied(self) -> Value:
        """The same content in memory of its own, where nobody minds if a wire writes."""
        return self._replace(tensor=self.tensor.clone(), out=None)


def nothing(value: Value) -> None:
    """The state of a compressor that remembers nothing."""


@dataclass(frozen=True)
class Compressor:
    """In what form a message travels. Equality and repr are by what one types.

    Args:
        name: what one types.
        traits: facts about it.
        init: state of a parameter before the first round.
        flow: ``(value, state, round)`` -> asks, then ``Agreed``. The state given stays as it is;
            that of the round before is nobody's any more, and its memory may be written to.
        add: how whoever receives a ONE_SHOT message adds it up.
        feedback: what ``error_feedback`` makes of it, where it knows better than to be wrapped.
        gamma: share of the way that a model goes to what its neighbours say.
        width: bits of a code, where the message's first part is codes that ``bits`` packed.
        timed: whether it goes by what rounds take (``Value.timing``).
    """

    name: str
    traits: Trait
    flow: Callable[[Value, Any, int], Flow] = field(compare=False)
    init: Callable[[Value], Any] = field(compare=False, default=nothing)
    add: Add | None = field(compare=False, default=None)
    feedback: Compressor | None = field(compare=False, default=None)
    gamma: float = field(compare=False, default=1.0)
    width: int = field(compare=False, default=8)
    timed: bool = field(compare=False, default=False)

    def __repr__(self) -> str:
        return self.name


def gathered(
    value: Value, parts: tuple[Tensor, ...], add: Add
) -> Generator[Ask, Any, tuple[Tensor, Callable[[], Tensor]]]:
    """Send a message: what all say together, and, for who asks, what mine alone says."""
    mean = yield Gather(parts, add, like=value.tensor)

    def mine() -> Tensor:
        whole = torch.zeros_like(value.tensor)
        add(parts, whole, 1.0)
        return whole

    return mean, mine


def add_dense(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
    """Add a message that is one dense tensor, of whatever precision."""
    into.add_(parts[0].to(into.dtype).view_as(into), alpha=weight)
