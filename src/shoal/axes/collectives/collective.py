"""The classes of the collectives axis: a route is a list of rounds, a round a tuple of copies.

The same rounds are checked by :func:`shoal.axes.collectives.kit.prove`, run by a wire, and used by
the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias


class Copy(NamedTuple):
    """Send a chunk to another rank.

    If ``add``, the other rank adds it to its own chunk. Otherwise it overwrites its own chunk.
    """

    source: int
    target: int
    chunk: int
    add: bool


Round = tuple[Copy, ...]
"""Copies that run at the same time: each sends the chunk as it was before the round."""

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
"""A network without measured times, for choices that do not use them."""


def any_world(world: int) -> str:
    """Return "", the ``refusal`` of a route that works for any number of workers."""
    return ""


def one_chunk(world: int) -> int:
    """Return 1, the ``chunks`` of a route that does not divide the message."""
    return 1


Contenders: TypeAlias = "Callable[[float, int, Network], tuple[Collective, ...]]"
"""(nbytes, world, network) -> routes that are timed before one of them is chosen."""


@dataclass(frozen=True, repr=False)
class Collective:
    """The route of an all-reduce, which gives all workers the sum. ``world`` counts the workers.

    Args:
        name: the text that a user types. Two collectives are equal if their names are equal.
        rounds: world -> the rounds, each a tuple of copies. None means the backend's own
            all-reduce, or the route that ``choose`` returns.
        chunks: world -> the number of chunks into which the message is divided.
        refusal: world -> why the route does not work for this number of workers, or "" if it does.
        choose: (nbytes, world, network) -> the route for a message of this size. None means that
            the route does not depend on the size.
        probes: whether ``choose`` needs measurements of the network.
        contenders: (nbytes, world, network) -> routes to time before one is chosen, torch's own
            first. If None, no routes are timed.
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
        """Return whether the backend's own all-reduce is used for messages of every size."""
        return self.rounds is None and self.choose is None

    def __repr__(self) -> str:
        return self.name
