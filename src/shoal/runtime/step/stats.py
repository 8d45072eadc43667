"""Sum the losses and samples of a step on this rank, and exchange the sums with all ranks.

Each rank publishes one `StepReport` per step. From the reports of all ranks, each rank computes the
mean loss over the global batch, and knows which rank's loss is NaN. There are three ways to publish
a report. The mode chooses one of them when it is built:

* `OwnReport` sends nothing, so each rank reads only its own report.
* `GatheredReports` sends the reports in one all-gather after the gradients.
* `TailReports` sends the reports in the flat buffer behind the last gradient, in the same message.
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
    """The sums of one rank in one step."""

    loss: float  # sum of the losses of its samples, or 0 if this sum is NaN or inf
    samples: float
    unused: float  # number of parameters without a gradient
    bad: float  # 1 if the sum of the losses is NaN or inf, otherwise 0


REPORT_WIDTH = len(StepReport._fields)
EMPTY_REPORT = StepReport(0.0, 0.0, 0.0, 0.0)


class StepReports(NamedTuple):
    """The reports of all ranks, or only the report of this rank."""

    reports: tuple[StepReport, ...]
    copies: int = 1  # how many ranks report the same sample

    @property
    def loss(self) -> float:
        """The mean over all samples, or NaN if there are none or a rank's loss is NaN or inf."""
        samples = sum(report.samples for report in self.reports)
        if self.bad_ranks() or not samples:
            return math.nan
        return sum(report.loss for report in self.reports) / samples

    @property
    def samples(self) -> int:
        """The number of samples in all reports. A sample on several ranks counts once."""
        return round(sum(report.samples for report in self.reports) / self.copies)

    @property
    def unused(self) -> bool:
        """Whether any rank has a parameter without a gradient."""
        return any(report.unused for report in self.reports)

    def bad_ranks(self) -> list[int]:
        """Return the indices of the reports whose loss is NaN or inf.

        An index is a rank if the reports of all ranks are present.
        """
        return [rank for rank, report in enumerate(self.reports) if report.bad]


PendingReports: TypeAlias = Callable[[], StepReports]
"""A function that waits for the reports, and returns them."""


class OwnReport:
    """Publishes nothing, so this rank reads only its own report."""

    def attach(self, report: Callable[[], StepReport]) -> None:
        """Do nothing before the last bucket is sent. `TailReports` writes ``report()`` into it."""

    def publish(self, report: StepReport) -> PendingReports:
        """Return a function that returns this rank's report only."""
        return partial(StepReports, (report,))


class GatheredReports(OwnReport):
    """Gathers the reports of ``size`` ranks. Each sample is reported by ``copies`` ranks."""

    def __init__(self, size: int, copies: int) -> None:
        self._size, self._copies = size, copies

    def publish(self, report: StepReport) -> PendingReports:
        """Start an all-gather of the reports, and return a function that waits for it."""
        numbers = torch.empty(self._size * REPORT_WIDTH, dtype=torch.float64)
        own = torch.tensor(report, dtype=torch.float64)
        work = gather_flat(numbers, own, async_op=True)

        def wait() -> StepReports:
            if work is not None:
                work.wait()
            return _read(numbers, self._copies)

        return wait


class TailReports(OwnReport):
    """Sends the reports in the tail of a flat buffer: ``REPORT_WIDTH`` numbers for each worker.

    Each worker writes its report at its own position in the tail, and zeros elsewhere. So the sum
    over workers contains all reports.
    """

    def __init__(self, tail: Tensor, worker: int) -> None:
        self._tail, self._worker = tail, worker

    def attach(self, report: Callable[[], StepReport]) -> None:
        """Write this worker's report into the tail."""
        row = [0.0] * self._tail.numel()
        row[REPORT_WIDTH * self._worker : REPORT_WIDTH * (self._worker + 1)] = report()
        self._tail.copy_(torch.tensor(row, dtype=self._tail.dtype))

    def publish(self, report: StepReport) -> PendingReports:
        """Return a function that reads the tail. Call it after the gradients are averaged."""
        return partial(_read, self._tail, 1)


def _read(numbers: Tensor, copies: int) -> StepReports:
    rows = numbers.view(-1, REPORT_WIDTH).tolist()
    return StepReports(tuple(StepReport(*row) for row in rows), copies)


def find_unused(
    unused: set[str], names: list[str], group: dist.ProcessGroup | None
) -> Callable[[], set[str]]:
    """Return a function that waits for the names of the parameters that no worker has used.

    An all-reduce is started at once, so all workers of the group must call this together.

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
    """Counts the samples and losses of the current step on this rank.

    Args:
        weighted: whether the exchange sums gradients, so that all weights must sum to 1. If
            False, the exchange averages gradients.
        together: whether the batches of all workers form one batch.
        shards: how many ranks of one replica read different samples.
    """

    def __init__(self, *, weighted: bool, together: bool, shards: int = 1) -> None:
        self.weighted, self.together, self.shards = weighted, together, shards
        self.events = 0  # number of batches opened and losses added in this run
        self.in_micro = False  # whether the user's loop is inside a micro-batch
        self.clear()

    def clear(self) -> None:
        """Start a new step. Inside a micro-batch (GANs), the new step uses the same samples."""
        self.losses: list[tuple[Tensor, int]] = []
        if self.in_micro:
            return
        self.samples = self.micro_samples = 0
        self.total: Callable[[], int] = int
        self.counted = False
        self.last_micro = False

    def open(self, samples: int, total: Callable[[], int]) -> None:
        """Start a step with ``samples`` samples on this rank, and ``total()`` in the batch."""
        if self.in_micro:
            raise UsageError(
                "run.micro or run.step cannot be called inside a loop over run.micro, because its"
                " samples would be weighed twice: call run.micro(batch, parts=...) once"
            )
        self.samples, self.total, self.counted = samples, total, True
        self.events += 1

    def add(self, loss: Tensor, samples: int) -> None:
        """Add the mean loss of a micro-batch, after its backward."""
        self.losses.append((loss, samples))
        self.events += 1

    def scale(self, samples: int, workers: int) -> float:
        """Return the weight of a mean loss, so that the exchange averages over all samples."""
        if not self.counted:  # without run.micro, all workers have equal weights
            return 1 / workers if self.weighted else 1.0
        if not self.together:  # FSDP averages over the shards of a replica
            return samples / max(self.total(), 1) * self.shards
        return samples / self.total() * (1 if self.weighted else workers)

    def report(self, *pending: tuple[Tensor, int]) -> StepReport:
        """Return this rank's report. ``pending`` has (loss, samples) of backwards still to run."""
        losses = [*self.losses, *pending]
        loss = sum(float(loss) * samples for loss, samples in losses)
        samples = sum(samples for _, samples in losses)
        bad = not math.isfinite(loss)
        return StepReport(0.0 if bad else loss, float(samples), 0.0, float(bad))


class Step:
    """One optimizer step of all workers.

    Args:
        number: the number of the step, from 0.
        wait: a function that waits for the reports, and returns them.
        skipped: whether all workers skipped the update because of a NaN or inf.
        norm: the 2-norm of the averaged gradient before clipping, or None if not computed.
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
        """The mean loss over the global batch. Reading it waits for the reports of all ranks.

        It is the mean over this rank's own batch if workers do not wait for each other, and in the
        steps of ``local(h)`` without an exchange.
        """
        return self._reports.loss

    @property
    def samples(self) -> int:
        """The number of samples over which ``loss`` is the mean."""
        return self._reports.samples

    def __repr__(self) -> str:
        return f"Step({self.number}, loss={self.loss:.6g}, samples={self.samples})"
