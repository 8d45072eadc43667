"""Plan messages anew while training, from what its own steps took.

Some steps after the last look, the numbers of all ranks leave behind the gradients. The answer is
taken up before the next backward, when nothing is under way: then every rank knows the same, and
binds the same messages.
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
from shoal.runtime.tuning.choose import Planned, ScheduleTuner, summary
from shoal.runtime.tuning.measure import MeasurementLayout, StepTimer, mean_nbytes

log = logging.getLogger("shoal")


class PendingMeasurements(NamedTuple):
    """Everybody's numbers, under way."""

    layout: MeasurementLayout
    numbers: Tensor
    work: dist.Work | None


class Replanning:
    """Looks at what steps took, now and then, and rebinds an engine's messages.

    Args:
        engine: whose agreement is planned anew.
        watch: what its steps took.
        context: who agrees on these numbers.
    """

    def __init__(self, engine: Engine, watch: StepTimer, context: RunContext) -> None:
        self.engine, self.watch, self.context = engine, watch, context
        self.schedule = engine.exchange.schedule
        views = engine.exchange.flat.views
        sizes = {n: views[n].view.nbytes for n in engine.parameters}
        self.choice = ScheduleTuner(self.schedule, [Layer(name, n) for name, n in sizes.items()])
        self._due = False
        self._asked: list[PendingMeasurements] = []
        self._last: float | None = None
        self._steps: list[float] = []
        self._changes = Changes(engine.parameters, self.schedule.every)

    def begin(self) -> None:
        """A step begins."""
        now = self.watch.now()
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last = now

    def ask(self) -> None:
        """A step's gradients are on their way: if it is time, numbers of those before follow."""
        step = self.watch.step
        self.watch.step = step + 1
        if self.watch.step % self.schedule.every == 0:
            self._due = True
            self.engine.queue.submit(lambda: self._issue(step))

    def _issue(self, step: int) -> None:
        tasks = self.engine.exchange.buckets
        nbytes = [bound.task.nbytes for bound in tasks]
        sizes = (mean_nbytes(nbytes),) if self._times else ()
        layout = MeasurementLayout(tuple(self.engine.parameters), sizes, self.schedule.every)
        window = range(step - self.schedule.every, step)
        records = [self.watch.records.get(number) if number else None for number in window]
        taken = median(self._steps) if self._steps else 0.0
        told = layout.numbers(records, nbytes, taken)
        device = self.context.world.device  # the group's backend may know no other
        numbers = torch.tensor([*self._changes.told, *told], dtype=torch.float64, device=device)
        work = dist.all_reduce(
            numbers, op=dist.ReduceOp.MAX, group=self.context.group, async_op=True
        )
        self._asked.append(PendingMeasurements(layout, numbers, work))

    @property
    def _times(self) -> bool:
        return self.schedule.measures == "times"

    def renew(self) -> None:
        """Nothing is under way: take up what was agreed, and change messages if that is better."""
        if not self._times:
            self._changes.note(self.watch.step)
        if not self._due:
            return
        self._due = False
        self.engine.queue.join()
        layout, numbers, work = self._asked.pop()
        if work is not None:
            work.wait()
        told = numbers.tolist()
        split = len(told) - len(layout.names) - len(layout.sizes) * layout.steps - 1
        planned = self.choice.look(layout.seen(told[split:], told[:split]))
        self._steps, self._last = [], None
        self.watch.records.clear()
        if planned is not None:
            self._bind(planned)

    def _bind(self, planned: Planned) -> None:
        agreement = self.engine.exchange
        changed = agreement.rebind(planned.schedule, planned.layers, planned.link.cost)
        self.engine.early = planned.schedule.early
        if changed:
            self.engine.bind()
        if self.context.world.is_main and (changed or self._times):
            cut = summary([bound.keys for bound in agreement.buckets])
            level = logging.INFO if self._times else logging.DEBUG
            log.log(level, "%s: %s (%s): %s", self.schedule, planned.schedule, cut, planned.why)


class Changes:
    """How much steps change parameters, relative to what they are.

    Args:
        parameters: by name.
        every: one step in so many is looked at.
    """

    def __init__(self, parameters: Mapping[str, Tensor], every: int) -> None:
        self.told: list[float] = []
        self._parameters, self._every = parameters, every
        self._before: list[Tensor] = []
        self._noted = -1

    @torch.no_grad()
    def note(self, step: int) -> None:
        """The updates before this step are done, and no other; told with this step's gradients."""
        if step == self._noted:
            return
        self._noted = step
        now = [p.detach() for p in self._parameters.values()]
        if (step + 1) % self._every == 0:
            self.told = [0.0] * len(now)
            for index, (p, old) in enumerate(zip(now, self._before, strict=False)):
                size = float(torch.linalg.vector_norm(p))
                moved = float(torch.linalg.vector_norm(p - old))
                self.told[index] = moved / size if size else float(moved > 0)
        self._before = [p.clone() for p in now] if (step + 2) % self._every == 0 else []
        if self._every == 1:
            self._before = [p.clone() for p in now]
