"""What a schedule is: a plan of messages, as data, that is run, priced, drawn and simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

Cost: TypeAlias = Callable[[int], float]
"""Seconds that a message of so many bytes takes."""


class Layer(NamedTuple):
    """One parameter, in the order in which forward meets it."""

    name: str
    nbytes: int
    forward: float = 0.0  # seconds
    backward: float = 0.0  # seconds


class Slice(NamedTuple):
    """Bytes ``start`` to ``stop`` of one layer."""

    layer: int
    start: int
    stop: int


class Event(NamedTuple):
    """A moment of the step: backward of a layer, the update, or a layer's next forward."""

    kind: Literal["backward", "update", "forward"]
    layer: int = 0


class Task(NamedTuple):
    """One message: what it carries, when it may go, when it must have arrived."""

    slices: tuple[Slice, ...]
    phase: Literal["reduce", "scatter", "gather"]
    ready: Event
    due: Event
    priority: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that the message stands for, before compression."""
        return sum(s.stop - s.start for s in self.slices)


@dataclass(frozen=True)
class Schedule:
    """In what order messages go: the order of the tuple, the same on every rank.

    Args:
        name: what one types.
        plan: ``(layers, cost) -> tasks``.
        overlaps: whether tasks go out during backward.
        slices: whether a tensor may be cut.
        early: whether a layer's next forward may start before the step is over.
    """

    name: str
    plan: Callable[[Sequence[Layer], Cost], tuple[Task, ...]] = field(compare=False)
    overlaps: bool = False
    slices: bool = False
    early: bool = False

    def __repr__(self) -> str:
        return self.name


def whole(layers: Sequence[Layer], index: int) -> Slice:
    """All of a layer."""
    return Slice(index, 0, layers[index].nbytes)


def fuse(layers: Sequence[Layer], first: int, limit: int) -> Iterator[tuple[int, ...]]:
    """Group layers from the last to the first; from ``limit`` bytes on, a group is full.

    The very first group closes at ``first`` bytes already, so that the link starts early.
    """
    group: list[int] = []
    size, closes = 0, min(first, limit)
    for index in reversed(range(len(layers))):
        group.append(index)
        size += layers[index].nbytes
        if size >= closes:
            yield tuple(group)
            group, size, closes = [], 0, limit
    if group:
        yield tuple(group)
