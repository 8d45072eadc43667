"""Change the buckets of a run while it trains, from the measured times of its steps.

1. Every few steps, an all-reduce behind the gradients reduces the measurements of all ranks.
2. Before the next backward, when no message is in transfer, each rank reads the result. All ranks
   read the same numbers, so all choose the same schedule and plan the same buckets.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.axes.scheduling import Layer
from shoal.runtime.context import RunContext
from shoal.runtime.step.engine import Engine
from shoal.runtime.tuning.choose import ScheduleChoice, ScheduleTuner, summary
from shoal.runtime.tuning.measure import MeasurementLayout, StepTimer, mean_nbytes

log = logging.getLogger("shoal")


class PendingMeasurements(NamedTuple):
    """A started all-reduce of measurements. At its end, ``numbers`` holds the result."""

    layout: MeasurementLayout
    numbers: Tensor
    work: dist.Work | None


class Replanning:
    """Measures steps, and every few steps lets a tuner choose the buckets of an engine again."""

    def __init__(self, engine: Engine, timer: StepTimer, context: RunContext) -> None:
        self.engine, self.timer, self.context = engine, timer, context
        self.schedule = engine.exchange.schedule
        self._measures_times = self.schedule.measures == "times"
        views = engine.exchange.flat.views
        layers = [Layer(name, views[name].view.nbytes) for name in engine.parameters]
        self.tuner = ScheduleTuner(self.schedule, layers)
        self._changes = ParameterChanges(engine.parameters, self.schedule.every)
        self._due = False  # whether an all-reduce was queued
        self._pending: list[PendingMeasurements] = []  # appended to by the communication thread
        self._last: float | None = None  # when the last step began
        self._steps: list[float] = []  # seconds of each step since the last call of the tuner

    def begin(self) -> None:
        """Record that a step begins."""
        now = self.timer.now()
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last = now

    def ask(self) -> None:
        """Every few steps, queue an all-reduce of measurements behind this step's gradients."""
        step = self.timer.step
        self.timer.step = step + 1
        if self.timer.step % self.schedule.every == 0:
            self._due = True
            self.engine.queue.submit(lambda: self._issue(step))

    def _issue(self, step: int) -> None:
        nbytes = [bucket.task.nbytes for bucket in self.engine.exchange.buckets]
        sizes = (mean_nbytes(nbytes),) if self._measures_times else ()
        layout = MeasurementLayout(tuple(self.engine.parameters), sizes, self.schedule.every)
        window = range(step - self.schedule.every, step)
        records = [self.timer.records.get(number) if number else None for number in window]
        seconds = median(self._steps) if self._steps else 0.0
        local = [*self._changes.relative, *layout.numbers(records, nbytes, seconds)]
        device = self.context.world.device  # the backend of the group may support no other
        numbers = torch.tensor(local, dtype=torch.float64, device=device)
        maximum, group = dist.ReduceOp.MAX, self.context.group
        work = dist.all_reduce(numbers, op=maximum, group=group, async_op=True)
        self._pending.append(PendingMeasurements(layout, numbers, work))

    def renew(self) -> None:
        """Read reduced measurements and change the buckets. No message may be in transfer."""
        if not self._measures_times:
            self._changes.record(self.timer.step)
        if not self._due:
            return
        self._due = False
        self.engine.queue.join()
        layout, numbers, work = self._pending.pop()
        if work is not None:
            work.wait()
        maxima = numbers.tolist()
        split = len(maxima) - len(layout.names) - len(layout.sizes) * layout.steps - 1
        choice = self.tuner.look(layout.seen(maxima[split:], maxima[:split]))
        self._steps, self._last = [], None
        self.timer.records.clear()
        if choice is not None:
            self._bind(choice)

    def _bind(self, choice: ScheduleChoice) -> None:
        exchange = self.engine.exchange
        changed = exchange.rebind(choice.schedule, choice.layers, choice.link.cost)
        self.engine.early = choice.schedule.early
        if changed:
            self.engine.bind()
        if self.context.world.is_main and (changed or self._measures_times):
            messages = summary([bucket.keys for bucket in exchange.buckets])
            level = logging.INFO if self._measures_times else logging.DEBUG
            log.log(level, "%s: %s (%s): %s", self.schedule, choice.schedule, messages, choice.why)


class ParameterChanges:
    """Measures, once in ``every`` steps, by how much one step changes each parameter."""

    def __init__(self, parameters: Mapping[str, Tensor], every: int) -> None:
        self.relative: list[float] = []  # |update| / |value| of each parameter, in order
        self._parameters, self._every = parameters, every
        self._before: list[Tensor] = []
        self._recorded = -1

    @torch.no_grad()
    def record(self, step: int) -> None:
        """Once in ``every`` steps, compare the parameters with their copies one step earlier."""
        if step == self._recorded:
            return
        self._recorded = step
        now = [p.detach() for p in self._parameters.values()]
        if (step + 1) % self._every == 0:
            self.relative = [0.0] * len(now)
            for index, (p, old) in enumerate(zip(now, self._before, strict=False)):
                size = float(torch.linalg.vector_norm(p))
                moved = float(torch.linalg.vector_norm(p - old))
                self.relative[index] = moved / size if size else float(moved > 0)
        due = self._every == 1 or (step + 2) % self._every == 0
        self._before = [p.clone() for p in now] if due else []
