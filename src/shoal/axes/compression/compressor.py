"""The protocol of the compression axis: a compressor has a name, traits, and a flow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Any, NamedTuple

from torch import Tensor

from shoal.errors import BadArgument
from shoal.flow import Add, Flow


class Trait(Flag):
    """Properties that a compressor declares. Rules read them; the contract suite tests each one."""

    NONE = 0
    LOSSLESS = auto()  # the result is the exact mean of the values
    UNBIASED = auto()  # the expectation of what a worker sends is its value
    CONTRACTIVE = auto()  # the error has a smaller norm than the value, so error feedback converges
    CONSERVING = auto()  # state[0] is a residual: what was not sent is kept there and sent later
    SLICEABLE = auto()  # accepts any flat slice of a tensor as value
    ELEMENTWISE = auto()  # treats each entry alone, so a whole bucket may be one value
    ONE_SHOT = auto()  # a flow has a single ask, and ``add`` decodes its message on any receiver
    SUMS = auto()  # a flow asks only for Mean, so every all-reduce route can carry its messages
    MERGES = auto()  # the result is not the mean of the messages, but a vote or a pairwise top-k
    UNSCALED = auto()  # the result does not depend on the norm of the values, as a vote of signs
    MOMENTUM = auto()  # the compressor applies momentum, so the optimizer must have none
    TRACKS = auto()  # the result converges if values stay the same, so models may be sent
    FACTORS = auto()  # uses ``Value.factors`` where the runtime recorded them

    def by_tensor(self, other: Trait) -> Trait:
        """Return the traits of a compressor that uses one of two compressors for each tensor.

        It has a trait of ``both`` if both compressors have it, and a trait of ``either`` if one or
        both have it. It has a trait of ``promises`` if both have it, or if one has it and the other
        is lossless. It has no other traits.
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
    """Measured times of a bucket, which the runtime passes to adaptive compressors."""

    bucket: int = 0  # a hash of the names of its tensors, or 0 if these are unknown
    took: tuple[float, float] | None = None  # seconds of the last round: (computing, exposed wait)
    leads: bool = False  # whether this value is the first one of the bucket
    label: str = ""  # the text for this value in logs; empty on ranks that do not log


class Value(NamedTuple):
    """A tensor that the workers average, and the name of its parameter.

    Args:
        tensor: the numbers, in the shape of the parameter or of a slice of it.
        name: the name of the parameter.
        factors: (u, v) with ``u.T @ v == tensor``, if the runtime recorded them.
        timing: measured times of the bucket that contains the value.
        out: memory for the mean, of the same shape. It may be ``tensor`` itself, so a flow writes
            to it only after its last read of ``tensor``.
    """

    tensor: Tensor
    name: str = ""
    factors: tuple[Tensor, Tensor] | None = None
    timing: BucketTiming = BucketTiming()
    out: Tensor | None = None

    def with_tensor(self, tensor: Tensor, out: Tensor | None = None) -> Value:
        """Return a value of the same parameter and timing, with another tensor and no factors."""
        return Value(tensor, self.name, timing=self.timing, out=out)

    def copied(self) -> Value:
        """Return the value with a copy of its tensor, which may be overwritten, and no ``out``."""
        return self._replace(tensor=self.tensor.clone(), out=None)


def nothing(value: Value) -> None:
    """Return None: the initial state of a compressor without state."""


@dataclass(frozen=True)
class Compressor:
    """How values are encoded. Two compressors are equal if their names and traits are equal.

    Args:
        name: the text that a user types.
        traits: the properties that it declares.
        init: ``init(value)`` returns the state before the first round.
        flow: ``flow(value, state, round)`` yields asks and returns an ``Agreed``. It must not
            change the state that it receives, but may overwrite the state that the previous
            round received.
        add: ``add(parts, into, weight)`` adds ``weight`` times the decoded message to ``into``.
        contraction: a contractive variant, which ``error_feedback`` uses in place of this one.
        gamma: step size towards the neighbours' models in gossip.
        width: bits per code, if the first part of a message holds codes packed by ``bit_packing``.
        timed: whether it reads ``Value.timing``.
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
        raise BadArgument(call, f"inner must be a compressor, as in {example}")


def add_dense(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
    """Add ``weight`` times a message that is one dense tensor to ``into``, in place."""
    into.add_(parts[0].to(into.dtype).view_as(into), alpha=weight)
