"""The protocol of the compression axis: a compressor is a name, traits, and a flow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Any, NamedTuple

from torch import Tensor

from shoal.errors import BadArgument
from shoal.flow import Add, Flow


class Trait(Flag):
    """Facts that rules decide on. The contract suite tests each one that a compressor declares."""

    NONE = 0
    LOSSLESS = auto()  # the mean of the messages is the exact mean of the values
    UNBIASED = auto()  # it is so in expectation
    CONTRACTIVE = auto()  # the error is shorter than the value: error feedback converges
    CONSERVING = auto()  # what was not sent is kept as the first item of the state, and sent later
    SLICEABLE = auto()  # may be applied to any flat slice of a tensor
    ELEMENTWISE = auto()  # acts on each entry alone: a whole bucket may be one value
    ONE_SHOT = auto()  # a single ask, which ``add`` decodes on any receiver
    SUMS = auto()  # asks for Mean only: any all-reduce route carries it
    MERGES = auto()  # the result is not the mean of the messages: a vote, a pairwise top-k
    UNSCALED = auto()  # the result has a direction but no length: a vote of signs
    MOMENTUM = auto()  # applies momentum itself: the optimizer must have none
    TRACKS = auto()  # converges to a value that stays the same: models may be sent
    FACTORS = auto()  # uses the factors of a linear layer's gradient, where they are available

    def by_tensor(self, other: Trait) -> Trait:
        """Return the traits of a compressor that uses one of two compressors for each tensor.

        Most facts must hold for both. A need of either one is a need of the whole. And a compressor
        without loss meets the promises about loss, so the other one decides on these.
        """
        both = Trait.LOSSLESS | Trait.UNBIASED | Trait.SLICEABLE | Trait.ONE_SHOT | Trait.SUMS
        either = Trait.MERGES | Trait.MOMENTUM | Trait.FACTORS
        promises = Trait.CONTRACTIVE | Trait.CONSERVING | Trait.TRACKS
        met = [t | promises if Trait.LOSSLESS in t else t for t in (self, other)]
        return (
            (self & other & both)
            | ((self | other) & either)
            | (met[0] & met[1] & (self | other) & promises)
        )


class BucketTiming(NamedTuple):
    """Timing feedback for adaptive compressors, filled in by the runtime."""

    bucket: int = 0  # identifies the tensors of the bucket; 0: unknown
    took: tuple[float, float] | None = None  # seconds of its last round: in flows, exposed
    leads: bool = False  # whether this value represents the bucket in logs
    label: str = ""  # the name of the bucket in logs, on the rank that logs


class Value(NamedTuple):
    """A tensor to agree on, and the parameter that it belongs to.

    Args:
        tensor: the numbers, in the shape of the parameter or of a slice of it.
        name: of the parameter.
        factors: (u, v) with ``u.T @ v == tensor``, where the runtime recorded them.
        timing: of the bucket in which the value travels.
        out: memory for the mean, of the same shape; it may be ``tensor`` itself, so a flow writes
            to it only once it needs the tensor no more.
    """

    tensor: Tensor
    name: str = ""
    factors: tuple[Tensor, Tensor] | None = None
    timing: BucketTiming = BucketTiming()
    out: Tensor | None = None

    def with_tensor(self, tensor: Tensor, out: Tensor | None = None) -> Value:
        """Return a value of the same parameter with another content, and memory for its mean."""
        return Value(tensor, self.name, timing=self.timing, out=out)

    def copied(self) -> Value:
        """Return the same value in new memory, which a wire may overwrite."""
        return self._replace(tensor=self.tensor.clone(), out=None)


def nothing(value: Value) -> None:
    """Return the state of a compressor that remembers nothing."""


@dataclass(frozen=True)
class Compressor:
    """The form in which values are sent. Two compressors are equal if name and traits are.

    Args:
        name: the text that a user types.
        traits: facts about it.
        init: ``value -> state`` before the first round.
        flow: ``(value, state, round)`` -> asks, then ``Agreed``. It must not change the state that
            it receives, but may reuse the memory of the state before that one.
        add: decodes a ONE_SHOT message on any receiver.
        contraction: the contractive form of an unbiased compressor, which ``error_feedback`` wraps.
        gamma: step size towards the neighbours' models in gossip.
        width: bits per code, if the first part of a message holds codes packed by ``bit_packing``.
        timed: whether it uses ``Value.timing``.
    """

    name: str
    traits: Trait
    flow: Callable[[Value, Any, int], Flow] = field(compare=False)
    init: Callable[[Value], Any] = field(compare=False, default=nothing)
    add: Add | None = field(compare=False, default=None)
    contraction: Compressor | None = field(compare=False, default=None)
    gamma: float = field(compare=False, default=1.0)
    width: int = field(compare=False, default=8)
    timed: bool = field(compare=False, default=False)

    def __repr__(self) -> str:
        return self.name


def check_inner(call: str, inner: object, example: str) -> None:
    """Raise unless ``inner`` is a compressor."""
    if not isinstance(inner, Compressor):
        raise BadArgument(call, f"it wraps a compressor, for example {example}")


def add_dense(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
    """Add a message that is one dense tensor, of any floating-point type."""
    into.add_(parts[0].to(into.dtype).view_as(into), alpha=weight)
