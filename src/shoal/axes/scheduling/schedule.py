"""What a schedule is: a plan of messages, as data, that is run, priced, drawn and simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

Cost: TypeAlias = Callable[[int], float]
"""Seconds that a message of so many bytes takes."""
Contenders: TypeAlias = "Callable[[Sequence[Layer], Cost], tuple[Schedule, ...]]"
"""Schedules of one kind, of which measuring finds the fastest."""


class Layer(NamedTuple):
    """One parameter, in the order in which forward meets it."""

    name: str
    nbytes: int
    forward: float = 0.0  # seconds
    backward: float = 0.0  # seconds
    change: float = 0.0  # |update| / |value| of a step


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
        scatters: whether sums are first scattered over ranks and gathered later.
        queues: whether messages overtake each other at the hops of a route: of those that wait, the
            one asked for last goes first, so the plan lists them from the least urgent on.
        window: messages that may be under way at once; 0 leaves it to the backend.
        measures: what the plan needs to know of the steps before, so that it is made anew as they
            tell: ``times`` of layers and messages, or ``changes`` of parameters.
        reorders: whether what is measured only changes the order: the messages stay the same.
        every: steps between such looks.
        contenders: ``(layers, cost) -> schedules`` among which a few steps of each decide, the most
            promising first; without, the plan is what it says.
    """

    name: str
    plan: Callable[[Sequence[Layer], Cost], tuple[Task, ...]] = field(compare=False)
    overlaps: bool = False
    slices: bool = False
    early: bool = False
    scatters: bool = False
    queues: bool = False
    window: int = 0
    measures: Literal["nothing", "times", "changes"] = "nothing"
    reorders: bool = False
    every: int = 5
    contenders: Contenders | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return self.name
