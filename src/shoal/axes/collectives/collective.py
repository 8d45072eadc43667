"""The protocol of the collectives axis: a route is data, copies of chunks in rounds.

One description serves all: :func:`shoal.axes.collectives.kit.prove` checks it, a wire runs it, a
cost model prices it, a plot draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias


class Copy(NamedTuple):
    """Send one chunk from ``source`` to ``target``, which adds it or replaces its own."""

    source: int
    target: int
    chunk: int
    add: bool


Round = tuple[Copy, ...]
"""Copies that run at the same time: each reads the chunk as it was before the round."""

Cost: TypeAlias = Callable[[float], float]
"""nbytes -> seconds."""


class Network(NamedTuple):
    """Measured times of a network, equal on every rank.

    Args:
        message: nbytes -> seconds of one message between two ranks.
        native: nbytes -> seconds of torch's own all-reduce.
    """

    message: Cost
    native: Cost


UNKNOWN = Network(lambda nbytes: 0.0, lambda nbytes: 0.0)
"""For choices that do not depend on the network."""


def any_world(world: int) -> str:
    """Accept any number of workers."""
    return ""


def one_chunk(world: int) -> int:
    """Send the message whole."""
    return 1


Contenders: TypeAlias = "Callable[[float, int, Network], tuple[Collective, ...]]"
"""(nbytes, world, network) -> routes."""


@dataclass(frozen=True, repr=False)
class Collective:
    """An all-reduce: a route after which all workers hold the sum.

    Args:
        name: the text that a user types; two collectives are equal if their names are.
        rounds: world -> the rounds, each a tuple of copies; None: the backend's own all-reduce.
        chunks: world -> the number of chunks into which a message is cut.
        refusal: world -> why it does not work for this number of workers; empty if it does.
        choose: (nbytes, world, network) -> the route for this size, if it depends on the size;
            then ``rounds`` is None.
        probes: whether the choice needs the network to be measured.
        contenders: (nbytes, world, network) -> routes to time before one is chosen, the safest
            first; None: ``choose`` decides alone.
    """

    name: str
    rounds: Callable[[int], Iterable[Round]] | None = field(compare=False)
    chunks: Callable[[int], int] = field(default=one_chunk, compare=False)
    refusal: Callable[[int], str] = field(default=any_world, compare=False)
    choose: Callable[[float, int, Network], Collective] | None = field(default=None, compare=False)
    probes: bool = field(default=True, compare=False)
    contenders: Contenders | None = field(default=None, compare=False)

    @property
    def is_native(self) -> bool:
        """Return whether the backend's own all-reduce runs for every size."""
        return self.rounds is None and self.choose is None

    def __repr__(self) -> str:
        return self.name
