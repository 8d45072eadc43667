"""Drive a replica's agreement on gradients while backward computes them.

Gradients live in flat buffers and parameters' ``.grad`` are views of them. When the last gradient
of a task has arrived its flow opens, asks, and is suspended; by the time backward ends most answers
are there. Tasks are issued in plan order, so that every rank enters collectives in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from shoal.axes.compression import Trait
from shoal.errors import UsageError
from shoal.runtime.step.comm_queue import CommThread, InlineQueue, PendingFlow
from shoal.runtime.step.exchange import Exchange
from shoal.runtime.step.stats import (
    EMPTY_REPORT,
    StepReport,
    StepReports,
    read_reports,
    write_report,
)
from shoal.runtime.tuning.measure import StepTimer
from shoal.wire.wire import Wire

LARGE = 2**16  # bytes: moved at once, while in the cache; smaller ones many at a time, in one call


class Engine:
    """Hooks on parameters that put gradients into messages, and messages on the wire.

    Args:
        agreement: the gradients and their tasks.
        wire: who answers.
        parameters: by the names that the agreement uses.
        worker: my number; my word on a step has its own place behind the last gradients.
        watch: notes when gradients and messages arrive, for schedules that measure.
    """

    def __init__(
        self,
        agreement: Exchange,
        wire: Wire,
        *,
        parameters: Mapping[str, Tensor],
        worker: int,
        watch: StepTimer | None = None,
    ) -> None:
        self.agreement = agreement
        self.wire = wire
        self.parameters = parameters
        self.live = False
        self.early = agreement.schedule.early  # whether forwards start early under today's plan
        self.rides = agreement.flats.has_tail
        self._worker = worker
        self._watch = watch
        self._word: Callable[[], StepReport] = lambda: EMPTY_REPORT
        self._tail = agreement.flats.tail
        self._views = {name: agreement.flats.places[name].view for name in parameters}
        at_once = not (wire.blocks or agreement.schedule.scatters)
        window = agreement.schedule.window
        simple = Trait.ONE_SHOT in agreement.compressor.traits and at_once and not window
        self.line: InlineQueue | CommThread = InlineQueue() if simple else CommThread()
        # a second half needs the first; others wait while the next is on its way
        lag = window - 1 if window else 0 if agreement.schedule.scatters else 1
        self._lag = None if simple else lag
        if agreement.stopwatch is not None:
            agreement.stopwatch.overlap()
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
            for name, p in parameters.items()
        ]
        self.bind()

    def bind(self) -> None:
        """Learn which tasks wait for which gradients; again when the agreement has other tasks."""
        tasks = self.agreement.tasks
        self._tasks_of: dict[str, list[int]] = {name: [] for name in self.parameters}
        for index, task in enumerate(tasks):
            for name in task.names:
                self._tasks_of[name].append(index)
        self._expected = [len(set(task.names)) for task in tasks]
        self._over = [0] * len(tasks)  # the job with whose end each is agreed
        self._reset()

    def _reset(self) -> None:
        self.live = False
        self._next = 0
        self._open: list[PendingFlow | None] = [None] * len(self.agreement.tasks)
        self._agreed: set[int] = set()
        self._missing = list(self._expected)
        self._here: set[str] = set()
        self._filled: set[str] = set()

    def arm(self, word: Callable[[], StepReport]) -> None:
        """The backward to come is the last of the step: gradients may leave as they arrive.

        Args:
            word: gives mine on the step, with its last loss; it leaves with the last gradients.
        """
        self._word = word
        self.live = True
        if self._watch is not None:
            self._watch.open()

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        """What runs when a parameter's gradient is there: little, for it runs in a cold cache."""
        large = (name,) if self._views[name].nbytes >= LARGE else ()
        watch = self._watch

        def arrived(_: Tensor) -> None:
            if not self.live:
                return
            if watch is not None:
                watch.arrived(name)
            if name in self._here:
                raise UsageError(
                    f"the gradient of {name} arrived twice in one backward (reentrant "
                    "checkpointing?): use use_reentrant=False, or the schedule fifo"
                )
            self._count(name)
            if large:
                self._fill(large)
            if self._missing[self._next] == 0:
                self._start_ready()

        return arrived

    def _count(self, name: str) -> None:
        self._here.add(name)
        for index in self._tasks_of[name]:
            self._missing[index] -= 1

    def _start_ready(self) -> None:
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._fill(self.agreement.tasks[self._next].names)
            if self.rides and self._next == len(self._missing) - 1:
                write_report(self._word(), self._tail, self._worker)
            job = self.line.submit(partial(self._start, self._next))
            if self._lag is not None and self._next >= self._lag:
                self._over[self._next - self._lag] = job
            self._next += 1

    def _fill(self, names: tuple[str, ...]) -> None:
        """Move gradients into their places, many at a time; from then on they are views."""
        views, grads = [], []
        for name in names:
            if name in self._filled:
                continue
            self._filled.add(name)
            parameter, view = self.parameters[name], self._views[name]
            grad = parameter.grad
            if grad is None:
                view.zero_()
            elif grad is not view:
                views.append(view)
                grads.append(grad.to_dense() if grad.is_sparse else grad)
            parameter.grad = view  # also of one that only others use: it gets theirs
        if len(views) == 1:
            views[0].copy_(grads[0])
        elif views:
            torch._foreach_copy_(views, grads)

    def _start(self, index: int) -> None:
        wire = self.wire if self._watch is None else self._watch.wire(index, self.wire)
        self._open[index] = PendingFlow(self.agreement.flow(index), wire)
        if self._lag is not None and index >= self._lag:
            self._finish(index - self._lag)

    def _finish(self, index: int) -> None:
        suspended = self._open[index]
        if suspended is not None:
            suspended.finish()

    def send_rest(self, word: StepReport) -> tuple[str, ...]:
        """Backward is over: issue what has not left yet; return whose gradient never came."""
        self.live = False
        unused = []
        for name, parameter in self.parameters.items():
            if name not in self._here:
                if parameter.grad is None:
                    unused.append(name)
                self._count(name)
        said = word._replace(unused=len(unused))
        self._word = lambda: said
        self._start_ready()
        if self._lag is not None and self.agreement.schedule.early:  # nobody will wait for all
            for index in range(max(0, len(self._over) - self._lag), len(self._over)):
                self._over[index] = self.line.submit(partial(self._finish, index))
        return tuple(unused)

    def table(self) -> StepReports:
        """Everybody's word, which came with the last gradients."""
        return read_reports(self._tail)

    def settle(self) -> None:
        """Wait until every task is agreed."""
        with self._standing():
            for index in range(len(self._open)):
                self.line.submit(partial(self._finish, index))
            self.line.join()
        self._reset()

    def settle_some(self, names: tuple[str, ...]) -> set[str]:
        """Wait until the tasks of these parameters are agreed, and no longer.

        Returns:
            Whose tasks are all agreed now: also of parameters that shared a message with these.
        """
        wanted = sorted({i for name in names for i in self._tasks_of[name]})
        with self._standing():
            if self._lag is not None:
                self.line.join(max((self._over[index] for index in wanted), default=0))
            else:
                for index in wanted:
                    self._finish(index)
        self._agreed.update(wanted)
        carried = {name for index in wanted for name in self.agreement.tasks[index].names}
        return {name for name in carried if self._agreed.issuperset(self._tasks_of[name])}

    def _standing(self) -> AbstractContextManager[None]:
        """Inside, the step stands still for messages."""
        watch = self.agreement.stopwatch
        return nullcontext() if watch is None else watch.standing()

    def forget(self) -> None:
        """The step's tasks are all agreed: make ready for the next."""
        self._reset()

    def close(self) -> None:
        """Take the hooks off and end the thread."""
        for handle in self._handles:
            handle.remove()
        self.line.close()
