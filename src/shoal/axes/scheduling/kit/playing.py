"""Compute the seconds of a step under a plan, by the recurrence of MG-WFBP for any plan.

The step begins with backward and ends with the next forward. Messages are sent one at a time, in
order. Each is sent when it is ready and the message before it has arrived. Before each part of the
step, computation waits for the messages that are due there. ``simulate.schedule`` computes these
seconds with an event queue, and also returns spans for a plot.

References:
    Shi, Chu & Li, `MG-WFBP <https://arxiv.org/abs/1811.11141>`_, 2019.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.axes.scheduling.schedule import Cost, Event, Layer, Task

UPDATE = Event("update")


def seconds(tasks: Sequence[Task], layers: Sequence[Layer], cost: Cost) -> float:
    """Return the seconds from the start of backward to the end of the next forward.

    ``cost`` returns the seconds of an all-reduce. A reduce-scatter or an all-gather takes half as
    long.
    """
    now, done = 0.0, dict[Event, float]()
    arrived: list[float] = []
    due: dict[Event, int] = {}  # index of the last task that is due at an event
    for number, task in enumerate(tasks):
        due[_moment(task.due)] = number
    for moment, taken in _moments(layers):
        for task in tasks[len(arrived) : due.get(moment, -1) + 1]:
            start = max(arrived[-1] if arrived else 0.0, done[_moment(task.ready)])
            arrived.append(start + cost(task.nbytes) * (1.0 if task.phase == "reduce" else 0.5))
        if moment in due:
            now = max(now, arrived[due[moment]])
        now += taken
        done[moment] = now
    return now


def _moments(layers: Sequence[Layer]) -> Iterator[tuple[Event, float]]:
    """Yield the events of a step in order, each with its seconds of computation."""
    for index in reversed(range(len(layers))):
        yield Event("backward", index), layers[index].backward
    yield UPDATE, 0.0
    for index, layer in enumerate(layers):
        yield Event("forward", index), layer.forward


def _moment(event: Event) -> Event:
    """Return the event, but the update without a layer, because a step has only one update."""
    return UPDATE if event.kind == "update" else event
