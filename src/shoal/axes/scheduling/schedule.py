"""The classes of the scheduling axis: a plan is a tuple of tasks that can be run or simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

Cost: TypeAlias = Callable[[int], float]
"""nbytes -> seconds of a message."""
Contenders: TypeAlias = "Callable[[Sequence[Layer], Cost], tuple[Schedule, ...]]"
"""(layers, cost) -> schedules that are run and timed before one of them is chosen."""


class Layer(NamedTuple):
    """One parameter. A sequence of layers is in the order in which forward uses them."""

    name: str
    nbytes: int
    forward: float = 0.0  # seconds
    backward: float = 0.0  # seconds
    change: float = 0.0  # |update| / |value| of the parameter in one step


class Slice(NamedTuple):
    """The bytes from ``start`` to ``stop`` (exclusive) of the layer with index ``layer``."""

    layer: int
    start: int
    stop: int


class Event(NamedTuple):
    """A part of the step: backward of a layer, the update, or the next forward of a layer."""

    kind: Literal["backward", "update", "forward"]
    layer: int = 0


class Task(NamedTuple):
    """One message: it can be sent after the event ``ready``, and must arrive before ``due``."""

    slices: tuple[Slice, ...]
    phase: Literal["reduce", "scatter", "gather"]
    ready: Event
    due: Event
    priority: int = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of the message before compression."""
        return sum(s.stop - s.start for s in self.slices)


@dataclass(frozen=True)
class Schedule:
    """How gradients are divided into messages, and in which order these are sent.

    Args:
        name: the text that a user types.
        plan: ``(layers, cost) -> tasks``. The tasks are in the order in which they are submitted,
            which is also the order of sending if ``queues`` is false. The plan must be equal on all
            ranks.
        overlaps: whether messages are sent during backward.
        slices: whether tensors may be cut.
        early: whether a layer's next forward may start before all gradients have arrived.
        scatters: whether a sum is computed by a reduce-scatter and, later, an all-gather.
        queues: whether messages overtake each other at the hops of a route. Of the waiting
            messages, the last submitted is sent first, so the plan lists the least urgent first.
        window: largest number of messages in transfer; with 0 the runtime decides.
        measures: what is measured before a new plan is made: ``times`` of layers and messages, or
            ``changes`` of parameters.
        reorders: whether measurements change only the order of messages, not their content.
        every: number of steps from one measurement to the next.
        contenders: ``(layers, cost) -> schedules``, the most promising first. Each runs for a few
            steps, and the fastest is chosen. If None, ``plan`` is used without a trial.
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
