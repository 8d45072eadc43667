"""Average the gradients while backward computes them. All workers have the same model."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shoal import rules
from shoal.axes.compression import Trait
from shoal.runtime.step.engine import Engine
from shoal.runtime.step.hooks import Factors, average_rows
from shoal.runtime.step.modes.mode import Apply, Mode, ModeSetup
from shoal.runtime.step.stats import (
    REPORT_WIDTH,
    PendingReports,
    StepReport,
    TailReports,
    find_unused,
)
from shoal.runtime.tuning.measure import StepTimer
from shoal.runtime.tuning.replan import Replanning


class OverlappedGradients(Mode):
    """Sends the buckets during backward, in plan order, when their gradients are computed.

    The `Engine` sends dense gradients. Sparse gradients (rows of embeddings) are averaged after
    the dense ones. Factors of linear layers are collected for compressors that send factors.
    """

    agrees = True

    def __init__(self, setup: ModeSetup) -> None:
        super().__init__(setup)
        in_tail = can_use_tail(setup)
        self.exchange = setup.exchange(tail=REPORT_WIDTH * setup.index.workers if in_tail else 0)
        self.step, self.sparse = 0, setup.sparse
        self.context, self.optimizer = setup.context, setup.optimizer
        _ = self.exchange.flat.storage  # allocate now, as all ranks must do this together
        if in_tail:
            self.reports = TailReports(self.exchange.flat.tail, setup.index.worker)
        measures, timer = self.exchange.schedule.measures, StepTimer()
        self.engine = Engine(
            self.exchange,
            setup.wire,
            parameters=self.parameters,
            reports=self.reports,
            timer=timer if measures == "times" else None,
        )
        self.planner: Replanning | None = None  # None if the buckets never change
        if measures != "nothing":
            self.planner = Replanning(self.engine, timer, setup.context)
        self._sends_factors = Trait.FACTORS in self.exchange.compressor.traits
        factored = self.parameters if self._sends_factors else {}
        self.exchange.factors = self.factors = Factors(setup.model_part.model, factored)

    def begin(self, step: int) -> None:
        """Record the start of the step, if the schedule needs measurements."""
        self.step = step
        if self.planner is not None:
            self.planner.begin()

    def arm(self, report: Callable[[], StepReport]) -> None:
        """Send gradients during the next backward, if the schedule overlaps."""
        self._renew_plan()
        if self.exchange.schedule.overlaps:
            self.engine.arm(report)

    def agree(self, report: StepReport) -> PendingReports:
        """Send the remaining buckets, wait for all buckets, and average the sparse gradients."""
        unused, pending = self._send(report)
        start = time.perf_counter()
        self.engine.settle()
        reports = pending()
        seconds = time.perf_counter() - start
        self.context.recorder.add("wait", "agree", start, seconds, 0, self.step)
        if self.sparse:
            average_rows(self.sparse.values(), self.wire)
        if reports.unused:
            self._drop_unused(unused)
        return lambda: reports

    def _send(self, report: StepReport) -> tuple[set[str], PendingReports]:
        """Send remaining buckets and the report. Return (unused parameters, pending reports)."""
        self._renew_plan()  # without run.micro, arm was not called
        unused = set(self.engine.send_rest(report))
        unused |= {name for name, p in self.sparse.items() if p.grad is None}
        report = report._replace(unused=len(unused))
        # Queued behind the gradients, so that all ranks issue collectives in the same order.
        pending = self.engine.queue.call(lambda: self.reports.publish(report))
        if self.planner is not None:
            self.planner.ask()
        return unused, pending

    def _renew_plan(self) -> None:
        """Let the planner change the buckets. No message may be in transfer."""
        if self.planner is not None:
            self.planner.renew()

    def _drop_unused(self, unused: set[str]) -> None:
        """Set gradients that no worker computed to None, because optimizers skip None."""
        parameters = {**self.parameters, **self.sparse}
        for name in find_unused(unused, list(parameters), self.context.group)():
            parameters[name].grad = None

    def finish(self, apply: Apply) -> float:
        """Call ``apply`` with the averaged gradients. Return 0, because nothing waits here."""
        apply()
        self.exchange.end_round()
        return 0.0

    def skip(self) -> None:
        """Restore the compressor's state from before the step."""
        self.exchange.revert()

    def clear(self) -> None:
        """Drop the factors of the gradients, if they are collected."""
        if self._sends_factors:
            self.factors.clear()

    def close(self) -> None:
        """Remove the hooks and end the communication thread."""
        self.factors.close()
        self.engine.close()


def can_use_tail(setup: ModeSetup) -> bool:
    """Return whether step reports can be sent in the tail of the gradients' buffer.

    This requires one buffer of float32 or float64 numbers that are summed without loss, tensors
    that are not sliced, and a bucket that is sent last on every rank.
    """
    s = setup.strategy
    ordered = s.coordination.via == "collective" and rules.can_overlap(s)
    exact = Trait.LOSSLESS in s.compression.traits and Trait.ELEMENTWISE in s.compression.traits
    kinds = {(p.dtype, p.device) for p in setup.parameters.values()}
    precise = all(dtype in (torch.float32, torch.float64) for dtype, _ in kinds)
    return ordered and not s.scheduling.slices and exact and len(kinds) == 1 and precise
