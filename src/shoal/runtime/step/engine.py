"""Exchange gradients while backward computes them.

Gradients live in flat buffers, and each parameter's ``.grad`` becomes a view of its buffer:

1. a hook runs when a gradient is complete, and copies it into the buffer;
2. when the last gradient of a bucket has arrived, its flow starts: it asks and is suspended;
3. buckets start in plan order, so that every rank enters its collectives in the same order;
4. after backward, `settle` waits for the answers, most of which have arrived by then.

``lag`` is the number of buckets between the one that starts and the one whose answer is then waited
for. Where asks return at once (`InlineQueue`) there is no lag: nothing is waited for until the end.
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
from shoal.runtime.step.stats import EMPTY_REPORT, OwnReport, StepReport
from shoal.runtime.tuning.measure import StepTimer
from shoal.wire.wire import Wire

LARGE = 2**16  # bytes: copied at once, while in the cache; smaller ones many at a time, in one call


class Engine:
    """Hooks on parameters that fill buckets with gradients, and start the buckets' flows.

    Args:
        exchange: the gradients and their buckets.
        wire: answers the asks.
        parameters: by the names that the exchange uses.
        reports: carries the step report, with the last bucket if it can.
        timer: records when gradients and messages arrive, for schedules that measure.
    """

    def __init__(
        self,
        exchange: Exchange,
        wire: Wire,
        *,
        parameters: Mapping[str, Tensor],
        reports: OwnReport | None = None,
        timer: StepTimer | None = None,
    ) -> None:
        self.exchange, self.wire, self.parameters = exchange, wire, parameters
        self.reports = reports or OwnReport()
        self.armed = False
        self.early = exchange.schedule.early  # whether forwards start early under today's plan
        self._timer = timer
        self._report: Callable[[], StepReport] = lambda: EMPTY_REPORT
        self._views = {name: exchange.flat.views[name].view for name in parameters}
        schedule = exchange.schedule
        at_once = not (wire.blocks or schedule.scatters or schedule.window)
        one_shot = Trait.ONE_SHOT in exchange.compressor.traits and at_once
        self.queue = InlineQueue() if one_shot else CommThread()
        # The gather half of a sum needs its scatter half first; other buckets wait one behind.
        lag = schedule.window - 1 if schedule.window else 0 if schedule.scatters else 1
        self._lag = None if one_shot else lag
        if exchange.stopwatch is not None:
            exchange.stopwatch.overlap()
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
            for name, p in parameters.items()
        ]
        self.bind()

    def bind(self) -> None:
        """Note which buckets wait for which gradients; call it again when the buckets change."""
        buckets = self.exchange.buckets
        self._buckets_of: dict[str, list[int]] = {name: [] for name in self.parameters}
        for index, bucket in enumerate(buckets):
            for name in bucket.names:
                self._buckets_of[name].append(index)
        self._expected = [len(set(bucket.names)) for bucket in buckets]
        self._last_job = [0] * len(buckets)  # the job at whose end each bucket is averaged
        self.reset()

    def reset(self) -> None:
        """Make ready for the next step: all buckets of this one are averaged."""
        self.armed = False
        self._next = 0
        self._flows: list[PendingFlow | None] = [None] * len(self.exchange.buckets)
        self._averaged: set[int] = set()
        self._missing = list(self._expected)
        self._arrived: set[str] = set()
        self._filled: set[str] = set()

    def arm(self, report: Callable[[], StepReport]) -> None:
        """Let gradients leave as they arrive: the backward to come is the last of the step.

        Args:
            report: returns this rank's step report; it is called before the last bucket leaves.
        """
        self._report = report
        self.armed = True
        if self._timer is not None:
            self._timer.open()

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        """Return the hook of one parameter. It does little, because it runs in a cold cache."""
        large = (name,) if self._views[name].nbytes >= LARGE else ()
        timer = self._timer

        def on_gradient(_: Tensor) -> None:
            if not self.armed:
                return
            if timer is not None:
                timer.arrived(name)
            if name in self._arrived:
                raise UsageError(
                    f"the gradient of {name} arrived twice in one backward (reentrant "
                    "checkpointing?): use use_reentrant=False, or the schedule fifo"
                )
            self._count(name)
            if large:
                self._fill(large)
            if self._missing[self._next] == 0:
                self._start_ready()

        return on_gradient

    def _count(self, name: str) -> None:
        self._arrived.add(name)
        for index in self._buckets_of[name]:
            self._missing[index] -= 1

    def _start_ready(self) -> None:
        """Start every bucket that is complete, up to the first that is not."""
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._fill(self.exchange.buckets[self._next].names)
            if self._next == len(self._missing) - 1:
                self.reports.attach(self._report)
            job = self.queue.submit(partial(self._start, self._next))
            if self._lag is not None and self._next >= self._lag:
                self._last_job[self._next - self._lag] = job
            self._next += 1

    def _fill(self, names: tuple[str, ...]) -> None:
        """Copy gradients into the buffer, many at a time; from then on ``.grad`` is the view."""
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
            parameter.grad = view  # also of a parameter that only other workers use
        if len(views) == 1:
            views[0].copy_(grads[0])
        elif views:
            torch._foreach_copy_(views, grads)

    def _start(self, index: int) -> None:
        wire = self.wire if self._timer is None else self._timer.wire(index, self.wire)
        self._flows[index] = PendingFlow(self.exchange.flow(index), wire)
        if self._lag is not None and index >= self._lag:
            self._finish(index - self._lag)

    def _finish(self, index: int) -> None:
        flow = self._flows[index]
        if flow is not None:
            flow.finish()

    def send_rest(self, report: StepReport) -> tuple[str, ...]:
        """After backward, start the buckets that have not left; return the unused parameters."""
        self.armed = False
        unused = []
        for name, parameter in self.parameters.items():
            if name not in self._arrived:
                if parameter.grad is None:
                    unused.append(name)
                self._count(name)
        self._report = lambda: report._replace(unused=len(unused))
        self._start_ready()
        if self._lag is not None and self.exchange.schedule.early:  # `settle` is not called
            for index in range(max(0, len(self._last_job) - self._lag), len(self._last_job)):
                self._last_job[index] = self.queue.submit(partial(self._finish, index))
        return tuple(unused)

    def settle(self) -> None:
        """Wait until every bucket is averaged."""
        with self._exposed():
            for index in range(len(self._flows)):
                self.queue.submit(partial(self._finish, index))
            self.queue.join()
        self.reset()

    def settle_some(self, names: tuple[str, ...]) -> set[str]:
        """Wait until the buckets of these parameters are averaged, and no longer.

        Return the parameters in these buckets all of whose buckets are averaged now.
        """
        wanted = sorted({i for name in names for i in self._buckets_of[name]})
        with self._exposed():
            if self._lag is not None:
                self.queue.join(max((self._last_job[index] for index in wanted), default=0))
            else:
                for index in wanted:
                    self._finish(index)
        self._averaged.update(wanted)
        carried = {name for index in wanted for name in self.exchange.buckets[index].names}
        return {name for name in carried if self._averaged.issuperset(self._buckets_of[name])}

    def _exposed(self) -> AbstractContextManager[None]:
        """Count the time spent inside as exposed communication."""
        stopwatch = self.exchange.stopwatch
        return nullcontext() if stopwatch is None else stopwatch.exposed_wait()

    def close(self) -> None:
        """Remove the hooks and end the queue."""
        for handle in self._handles:
            handle.remove()
        self.queue.close()
