"""Exchange gradients while backward computes them.

Gradients are stored in flat buffers, and each parameter's ``.grad`` becomes a view of its buffer:

1. A hook runs when a gradient has been computed. It copies a large gradient into the buffer.
2. When a bucket has all its gradients, the small ones are copied, and its flow issues an ask.
3. Buckets start in plan order, so that every rank enters its collectives in the same order.
4. After backward, `settle` waits for the answers, most of which have arrived by then.

With a `CommThread`, the job that starts bucket i then finishes bucket i - ``lag``, so that few
flows are open at once. With an `InlineQueue`, ``lag`` is None, and flows are finished only after
backward.
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

LARGE = 2**16  # gradients of at least so many bytes are copied at once, while in the cache


class Engine:
    """Puts hooks on parameters, which copy gradients into buckets and start the buckets' flows.

    Args:
        exchange: the exchange that has the flat buffers and the buckets.
        wire: the wire that answers the asks of the flows.
        parameters: the parameters, by the names that the exchange uses.
        reports: the object that may write the step report into the last bucket.
        timer: records when gradients and messages arrive. None if the schedule needs no times.
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
        self.early = exchange.schedule.early  # whether the current plan lets forwards start early
        self._timer = timer
        self._report: Callable[[], StepReport] = lambda: EMPTY_REPORT
        self._views = {name: exchange.flat.views[name].view for name in parameters}
        schedule = exchange.schedule
        at_once = not (wire.blocks or schedule.scatters or schedule.window)
        one_shot = Trait.ONE_SHOT in exchange.compressor.traits and at_once
        self.queue = InlineQueue() if one_shot else CommThread()
        # The gather task of a bucket needs the result of its scatter task, so these have no lag.
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
        """Record which buckets contain which gradients. Call this when the buckets change."""
        buckets = self.exchange.buckets
        self._buckets_of: dict[str, list[int]] = {name: [] for name in self.parameters}
        for index, bucket in enumerate(buckets):
            for name in bucket.names:
                self._buckets_of[name].append(index)
        self._expected = [len(set(bucket.names)) for bucket in buckets]
        self._last_job = [0] * len(buckets)  # number of the job that finishes each bucket
        self.reset()

    def reset(self) -> None:
        """Prepare for the next step. All buckets of the current step must be averaged."""
        self.armed = False
        self._next = 0
        self._flows: list[PendingFlow | None] = [None] * len(self.exchange.buckets)
        self._averaged: set[int] = set()
        self._missing = list(self._expected)
        self._arrived: set[str] = set()
        self._filled: set[str] = set()

    def arm(self, report: Callable[[], StepReport]) -> None:
        """Send gradients during the next backward, which is the last one of the step.

        Args:
            report: a function that returns this rank's step report. It is called just before the
                last bucket starts, if this bucket starts during backward.
        """
        self._report = report
        self.armed = True
        if self._timer is not None:
            self._timer.open()

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        """Return the gradient hook of one parameter. It does little, to keep backward fast."""
        large = (name,) if self._views[name].nbytes >= LARGE else ()
        timer = self._timer

        def on_gradient(_: Tensor) -> None:
            if not self.armed:
                return
            if timer is not None:
                timer.arrived(name)
            if name in self._arrived:
                raise UsageError(
                    f"the gradient of {name} was computed twice in one backward, as reentrant "
                    "checkpointing does: use use_reentrant=False, or the schedule fifo"
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
        """Start the next buckets in plan order, up to the first that lacks a gradient."""
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._fill(self.exchange.buckets[self._next].names)
            if self._next == len(self._missing) - 1:
                self.reports.attach(self._report)
            job = self.queue.submit(partial(self._start, self._next))
            if self._lag is not None and self._next >= self._lag:
                self._last_job[self._next - self._lag] = job
            self._next += 1

    def _fill(self, names: tuple[str, ...]) -> None:
        """Copy gradients into the buffer, and make each ``.grad`` a view of it."""
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
            parameter.grad = view  # also if this worker has no gradient, as others may have one
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
        """Start the remaining buckets after backward. Return the parameters without a gradient."""
        self.armed = False
        unused = []
        for name, parameter in self.parameters.items():
            if name not in self._arrived:
                if parameter.grad is None:
                    unused.append(name)
                self._count(name)
        self._report = lambda: report._replace(unused=len(unused))
        self._start_ready()
        if self._lag is not None and self.exchange.schedule.early:  # `settle` is not called then
            for index in range(max(0, len(self._last_job) - self._lag), len(self._last_job)):
                self._last_job[index] = self.queue.submit(partial(self._finish, index))
        return tuple(unused)

    def settle(self) -> None:
        """Wait until every bucket is averaged, and prepare for the next step."""
        with self._exposed():
            for index in range(len(self._flows)):
                self.queue.submit(partial(self._finish, index))
            self.queue.join()
        self.reset()

    def settle_some(self, names: tuple[str, ...]) -> set[str]:
        """Wait until the buckets that contain these parameters are averaged.

        Return the parameters in these buckets that are averaged completely. A parameter may also
        have slices in other buckets, which may not be averaged yet.
        """
        wanted = sorted({i for name in names for i in self._buckets_of[name]})
        with self._exposed():
            if self._lag is not None:
                self.queue.join(max((self._last_job[index] for index in wanted), default=0))
            else:
                for index in wanted:
                    self._finish(index)
        self._averaged.update(wanted)
        touched = {name for index in wanted for name in self.exchange.buckets[index].names}
        return {name for name in touched if self._averaged.issuperset(self._buckets_of[name])}

    def _exposed(self) -> AbstractContextManager[None]:
        """Return a context in which the stopwatch counts the time as exposed communication."""
        stopwatch = self.exchange.stopwatch
        return nullcontext() if stopwatch is None else stopwatch.exposed_wait()

    def close(self) -> None:
        """Remove the hooks and end the queue."""
        for handle in self._handles:
            handle.remove()
        self.queue.close()
