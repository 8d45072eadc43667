"""A collective is data: who copies which chunk to whom, round by round.

One description has many readers: :func:`shoal.axes.collectives.kit.prove` checks it, a wire runs
it, a cost model prices it, a picture draws it. None of them can drift from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias


class Copy(NamedTuple):
    """One chunk goes from ``source`` to ``target``, and is added there or takes the place."""

    source: int
    target: int
    chunk: int
    add: bool


Round = tuple[Copy, ...]
"""Copies that happen at once: each reads what its source held before the round."""

Cost: TypeAlias = Callable[[float], float]
"""Seconds that so many bytes take."""


class Network(NamedTuple):
    """What a network was measured to take, the same on every rank.

    Args:
        message: nbytes -> seconds of one message between two ranks.
        native: nbytes -> seconds of torch's own all-reduce.
    """

    message: Cost
    native: Cost


UNKNOWN = Network(lambda nbytes: 0.0, lambda nbytes: 0.0)
"""For a choice that does not look at it."""


def any_world(world: int) -> str:
    """Refuse no number of workers."""
    return ""


Contenders: TypeAlias = "Callable[[float, int, Network], tuple[Collective, ...]]"
"""(nbytes, world, network) -> routes."""


@dataclass(frozen=True, repr=False)
class Collective:
    """A route by which all workers come to hold the sum.

    Args:
        name: what one types; two collectives are equal when their names are.
        rounds: world -> the rounds, each a tuple of copies; None means whatever torch does.
        chunks: world -> into how many chunks a message is cut.
        refusal: world -> why it cannot serve so many workers; empty when it can.
        choose: (nbytes, world, network) -> the route for messages of that size, when it differs
            with size; then ``rounds`` is None.
        probes: whether the choice looks at the network, which is then measured.
        contenders: (nbytes, world, network) -> routes to be timed before one is taken, the surest
            first; None: ``choose`` decides alone.
    """

    name: str
    rounds: Callable[[int], Iterable[Round]] | None = field(compare=False)
    chunks: Callable[[int], int] = field(compare=False)
    refusal: Callable[[int], str] = field(default=any_world, compare=False)
    choose: Callable[[float, int, Network], Collective] | None = field(default=None, compare=False)
    probes: bool = field(default=True, compare=False)
    contenders: Contenders | None = field(default=None, compare=False)

    @property
    def is_native(self) -> bool:
        """Whether torch's own all-reduce runs, whatever the size."""
        return self.rounds is None and self.choose is None

    def __repr__(self) -> str:
        return self.name
