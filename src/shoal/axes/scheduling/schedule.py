"""The protocol of the scheduling axis: a plan of messages is data, to run, price and simulate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

Cost: TypeAlias = Callable[[int], float]
"""nbytes -> seconds of a message."""
Contenders: TypeAlias = "Callable[[Sequence[Layer], Cost], tuple[Schedule, ...]]"
"""(layers, cost) -> schedules to time before one is chosen."""


class Layer(NamedTuple):
    """One parameter, in the order in which forward uses it."""

    name: str
    nbytes: int
    forward: float = 0.0  # seconds
    backward: float = 0.0  # seconds
    change: float = 0.0  # |update| / |value| in one step


class Slice(NamedTuple):
    """Bytes ``start`` to ``stop`` of one layer."""

    layer: int
    start: int
    stop: int


class Event(NamedTuple):
    """A point in the step: backward of a layer, the update, or a layer's next forward."""

    kind: Literal["backward", "update", "forward"]
    layer: int = 0


class Task(NamedTuple):
    """One message: its content, when it is ready to go, and when it is due."""

    slices: tuple[Slice, ...]
    phase: Literal["reduce", "scatter", "gather"]
    ready: Event
    due: Event
    priority: int = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of the content, before compression."""
        return sum(s.stop - s.start for s in self.slices)


@dataclass(frozen=True)
class Schedule:
    """The order of messages: that of the plan, the same on every rank.

    Args:
        name: the text that a user types.
        plan: ``(layers, cost) -> tasks``.
        overlaps: whether messages are sent during backward.
        slices: whether tensors may be cut.
        early: whether a layer's next forward may start before the step is over.
        scatters: whether a sum is a reduce-scatter and, later, an all-gather.
        queues: whether messages overtake each other at the hops of a route: of those that wait, the
            last one submitted goes first, so the plan lists the least urgent first.
        window: messages in transfer at once; 0 leaves it to the backend.
        measures: what must be measured before the plan is made again: ``times`` of layers and
            messages, or ``changes`` of parameters.
        reorders: whether measurements change only the order, and not the messages.
        every: steps between measurements.
        contenders: ``(layers, cost) -> schedules`` that run for a few steps each before the fastest
            is chosen, the most promising first; None: ``plan`` decides.
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
