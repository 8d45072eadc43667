"""Sum losses and samples of a step, and report them to all ranks, with unused parameters and NaN.

Every rank publishes one small `StepReport` per step, and every rank receives all of them: so the
loss is the mean over the global batch, and a rank whose loss is NaN is named. A report is carried
in one of three ways, chosen when the mode is built:

* `OwnReport`: each rank sees only its own (one worker, or workers that do not wait for others);
* `GatheredReports`: one all-gather behind the gradients;
* `TailReports`: in the flat buffer behind the last gradient, at no cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import UsageError
from shoal.wire.wire import gather_flat


class StepReport(NamedTuple):
    """The report of one rank."""

    loss: float  # sum over its samples
    samples: float
    unused: float  # number of parameters without a gradient
    bad: float  # 1 if the loss is NaN or inf


REPORT_WIDTH = len(StepReport._fields)
EMPTY_REPORT = StepReport(0.0, 0.0, 0.0, 0.0)


class StepReports(NamedTuple):
    """The reports of all ranks."""

    reports: tuple[StepReport, ...]
    copies: int = 1  # ranks that report the same samples

    @property
    def loss(self) -> float:
        """Mean over all samples; NaN if any rank's loss is not finite."""
        samples = sum(report.samples for report in self.reports)
        if self.bad_ranks() or not samples:
            return math.nan
        return sum(report.loss for report in self.reports) / samples

    @property
    def samples(self) -> int:
        """Samples of all workers, each counted once."""
        return round(sum(report.samples for report in self.reports) / self.copies)

    @property
    def unused(self) -> bool:
        """Whether any rank lacks a gradient."""
        return any(report.unused for report in self.reports)

    def bad_ranks(self) -> list[int]:
        """Ranks whose loss is NaN or inf."""
        return [rank for rank, report in enumerate(self.reports) if report.bad]


PendingReports: TypeAlias = Callable[[], StepReports]
"""Waits for the reports of all ranks, and returns them."""


class OwnReport:
    """Reports only to this rank."""

    def attach(self, report: Callable[[], StepReport]) -> None:
        """Do nothing; `TailReports` adds the report to the last bucket, which leaves next."""

    def publish(self, report: StepReport) -> PendingReports:
        """Return a function that returns this rank's report; other classes return all ranks'."""
        return partial(StepReports, (report,))


class GatheredReports(OwnReport):
    """Gathers the reports of ``size`` ranks, of which ``copies`` report the same samples."""

    def __init__(self, size: int, copies: int) -> None:
        self._size, self._copies = size, copies

    def publish(self, report: StepReport) -> PendingReports:
        """Start an all-gather of the reports."""
        numbers = torch.empty(self._size * REPORT_WIDTH, dtype=torch.float64)
        own = torch.tensor(report, dtype=torch.float64)
        work = gather_flat(numbers, own, async_op=True)

        def wait() -> StepReports:
            if work is not None:
                work.wait()
            return _read(numbers, self._copies)

        return wait


class TailReports(OwnReport):
    """Carries the reports in the tail of a flat buffer: ``REPORT_WIDTH`` numbers for each worker.

    Each rank writes its own report into its own place and zeros elsewhere, so that the sum over
    ranks holds all reports.
    """

    def __init__(self, tail: Tensor, worker: int) -> None:
        self._tail, self._worker = tail, worker

    def attach(self, report: Callable[[], StepReport]) -> None:
        """Write this rank's report into the tail."""
        row = [0.0] * self._tail.numel()
        row[REPORT_WIDTH * self._worker : REPORT_WIDTH * (self._worker + 1)] = report()
        self._tail.copy_(torch.tensor(row, dtype=self._tail.dtype))

    def publish(self, report: StepReport) -> PendingReports:
        """Read the tail once the gradients have arrived."""
        return partial(_read, self._tail, 1)


def _read(numbers: Tensor, copies: int) -> StepReports:
    rows = numbers.view(-1, REPORT_WIDTH).tolist()
    return StepReports(tuple(StepReport(*row) for row in rows), copies)


def find_unused(
    unused: set[str], names: list[str], group: dist.ProcessGroup | None
) -> Callable[[], set[str]]:
    """Start to find the parameters without a gradient on all workers of a group.

    Args:
        unused: the parameters without a gradient on this worker.
        names: all parameters, in the same order on every worker.
    """
    present = torch.tensor([name not in unused for name in names], dtype=torch.uint8)
    if group is None and not dist.is_initialized():
        return lambda: unused
    work = dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def wait() -> set[str]:
        if work is not None:
            work.wait()
        return {name for name, used in zip(names, present.tolist(), strict=True) if not used}

    return wait


class StepStats:
    """Samples and losses of the current step, on this rank.

    Args:
        weighted: gradients are summed over workers, not averaged, so their weights sum to one.
        together: the samples of all workers make one batch; else each worker weighs its own.
        shards: ranks of one replica that read different samples.
    """

    def __init__(self, *, weighted: bool, together: bool, shards: int = 1) -> None:
        self.weighted, self.together, self.shards = weighted, together, shards
        self.events = 0  # batches opened and losses added since the run began
        self.in_micro = False  # the user's loop holds a micro-batch
        self.clear()

    def clear(self) -> None:
        """Start a new step. Inside a micro-batch (GANs) it is a step over the same batch."""
        self.losses: list[tuple[Tensor, int]] = []
        if self.in_micro:
            return
        self.samples = self.micro_samples = 0
        self.total: Callable[[], int] = int
        self.counted = False
        self.last_micro = False

    def open(self, samples: int, total: Callable[[], int]) -> None:
        """Start a step over ``samples`` samples on this rank and ``total()`` on all."""
        if self.in_micro:
            raise UsageError(
                "run.micro (or run.step) inside a loop over run.micro: its samples would be"
                " weighed twice; cut the batch once, with run.micro(batch, parts=...)"
            )
        self.samples, self.total, self.counted = samples, total, True
        self.events += 1

    def add(self, loss: Tensor, samples: int) -> None:
        """Add the loss of a micro-batch whose backward is done."""
        self.losses.append((loss, samples))
        self.events += 1

    def scale(self, samples: int, workers: int) -> float:
        """Factor of a micro-batch's mean loss that makes the averaged gradient the exact mean."""
        if not self.counted:  # a loop without run.micro: every worker weighs the same
            return 1 / workers if self.weighted else 1.0
        if not self.together:  # a replica's own batch; torch averages over its shards
            return samples / max(self.total(), 1) * self.shards
        return samples / self.total() * (1 if self.weighted else workers)

    def report(self, *pending: tuple[Tensor, int]) -> StepReport:
        """Return this rank's report; ``pending`` are losses whose backward is still to come."""
        losses = [*self.losses, *pending]
        loss = sum(float(loss) * samples for loss, samples in losses)
        samples = sum(samples for _, samples in losses)
        bad = not math.isfinite(loss)
        return StepReport(0.0 if bad else loss, float(samples), 0.0, float(bad))


class Step:
    """One optimizer step of all workers.

    Args:
        number: counted from 0.
        wait: returns the reports of all ranks once they have arrived.
        skipped: whether all workers skipped it because of a NaN or inf.
        norm: the norm of the averaged gradient before clipping, where it was measured.
    """

    def __init__(
        self, number: int, wait: PendingReports, *, skipped: bool = False, norm: float | None = None
    ) -> None:
        self.number, self.skipped, self.norm = number, skipped, norm
        self._wait = wait

    @cached_property
    def _reports(self) -> StepReports:
        return self._wait()

    @property
    def loss(self) -> float:
        """Mean over the global batch.

        It is the mean over this rank's own batch where workers do not wait for each other, and
        between the exchanges of ``local(h)``.
        """
        return self._reports.loss

    @property
    def samples(self) -> int:
        """Samples in the batch over which ``loss`` is the mean."""
        return self._reports.samples

    def __repr__(self) -> str:
        return f"Step({self.number}, loss={self.loss:.6g}, samples={self.samples})"
