"""Compute the seconds of a communication schedule: simulate one step in virtual time.

The step begins with backward and ends with the next forward, so overlap with both is included. Two
processes run on one clock:

* *compute* runs backward from the last layer to the first, the update, then forward from the first
  layer to the last. Before each of these events, it waits for the messages that are due there.
* *link* sends one message at a time, in the order of the tasks. A message is sent when it is ready
  and the message before it has arrived.

The model assumes that computation and messages do not slow each other down, and that the update
takes no time.

References:
    Shi, Chu & Li, `MG-WFBP <https://arxiv.org/abs/1811.11141>`_, 2019 (the recurrence for WFBP).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shoal.axes.scheduling import Cost, Event, Layer, Task
from shoal.errors import BadArgument
from shoal.simulate.clock import Clock, Process
from shoal.timeline.span import COMPUTE, EXCHANGE, WAIT, Span


class SimulatedStep(NamedTuple):
    """The seconds of one step, and its spans sorted by their start."""

    seconds: float
    spans: tuple[Span, ...]


def schedule_seconds(tasks: Sequence[Task], layers: Sequence[Layer], cost: Cost) -> SimulatedStep:
    """Simulate one step, from the start of backward to the end of the next forward.

    Args:
        tasks: the plan of a schedule for these layers.
        layers: the layers in the order of forward, with their seconds.
        cost: takes nbytes and returns the seconds of an all-reduce. Each of the phases ``scatter``
            and ``gather`` takes half of these seconds.
    """
    step = _Step(tasks, layers, cost)
    computed = step.clock.start(step.compute())
    step.clock.start(step.link())
    step.clock.run()
    if not computed.happened:
        number = next(i for i, arrived in enumerate(step.arrived) if not arrived.happened)
        ready, due = (f"{m.kind}({m.layer})" for m in (tasks[number].ready, tasks[number].due))
        why = (
            f"task {number} can never arrive before {due}, at which it is due: it is ready only "
            f"after {ready}, or an earlier task arrives too late"
        )
        raise BadArgument(f"schedule_seconds({len(tasks)} tasks)", why)
    return SimulatedStep(computed.value, tuple(sorted(step.spans, key=lambda span: span.start)))


class _Step:
    """The state of one simulated step."""

    def __init__(self, tasks: Sequence[Task], layers: Sequence[Layer], cost: Cost) -> None:
        self.clock = Clock()
        self.spans: list[Span] = []
        self.tasks, self.layers, self.cost = tasks, layers, cost
        self.done = {moment: self.clock.event() for moment in _moments(len(layers))}
        self.arrived = [self.clock.event() for _ in tasks]
        self.due: dict[Event, list[int]] = {}
        for number, task in enumerate(tasks):
            for moment in (task.ready, task.due):
                if _plain(moment) not in self.done:
                    call = f"schedule_seconds({len(layers)} layers)"
                    raise BadArgument(call, f"task {number}: there is no layer {moment.layer}")
            self.due.setdefault(_plain(task.due), []).append(number)

    def compute(self) -> Process:
        for moment, done in self.done.items():
            start, name = self.clock.now, self._name(moment)
            for number in self.due.get(moment, ()):
                yield self.arrived[number]
            self._span(WAIT, f"before {name}", start)
            start = self.clock.now
            yield self._seconds(moment)
            self._span(COMPUTE, name, start)
            done.fire()
        return self.clock.now

    def link(self) -> Process:
        for task, arrived in zip(self.tasks, self.arrived, strict=True):
            yield self.done[_plain(task.ready)]
            start = self.clock.now
            yield self.cost(task.nbytes) * (1.0 if task.phase == "reduce" else 0.5)
            self._span(EXCHANGE, self._message_name(task), start, task.nbytes)
            arrived.fire()

    def _span(self, lane: str, name: str, start: float, nbytes: int = 0) -> None:
        if self.clock.now > start or nbytes:
            self.spans.append(Span(0, lane, name, start, self.clock.now - start, nbytes, 0))

    def _seconds(self, moment: Event) -> float:
        if moment.kind == "update":
            return 0.0
        layer = self.layers[moment.layer]
        return layer.forward if moment.kind == "forward" else layer.backward

    def _name(self, moment: Event) -> str:
        if moment.kind == "update":
            return "update"
        return f"{moment.kind} {self.layers[moment.layer].name}"

    def _message_name(self, task: Task) -> str:
        names = [self.layers[s.layer].name for s in task.slices]
        ends = names if len(names) < 2 else [names[0], "..", names[-1]]
        return " ".join([task.phase, *ends])


def _moments(layers: int) -> Iterator[Event]:
    """Yield the events of a step, in the order in which they are computed."""
    yield from (Event("backward", index) for index in reversed(range(layers)))
    yield Event("update")
    yield from (Event("forward", index) for index in range(layers))


def _plain(moment: Event) -> Event:
    """Return the event, but an update without its layer, because a step has only one update."""
    return Event("update") if moment.kind == "update" else moment
