"""A few numbers that every step agrees on besides gradients: loss, samples, what is missing.

They travel as one small message behind the gradients, so that they cost next to nothing, and every
worker sees every worker's: whoever has a NaN is named.

What a step adds up while its micro-batches pass: samples, losses, weights.

What one step came to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import NonFinite, UsageError
from shoal.wire.wire import gather_flat

if TYPE_CHECKING:
    from torch import Tensor

REPORT_WIDTH = 4


class StepReport(NamedTuple):
    """What one worker says of its step."""

    loss: float  # sum over its samples
    samples: float
    unused: float  # parameters without a gradient
    bad: float  # 1: my loss is NaN or inf


EMPTY_REPORT = StepReport(0.0, 0.0, 0.0, 0.0)


class StepReports(NamedTuple):
    """What all workers said."""

    words: tuple[StepReport, ...]
    copies: int = 1  # ranks that speak of the same samples: those that share a model

    @property
    def loss(self) -> float:
        """Mean over all samples; NaN when a part of it is not finite."""
        if self.bad_ranks():
            return math.nan
        samples = sum(word.samples for word in self.words)
        return sum(word.loss for word in self.words) / samples if samples else math.nan

    @property
    def samples(self) -> int:
        """Of all workers, each once."""
        return round(sum(word.samples for word in self.words) / self.copies)

    @property
    def unused(self) -> bool:
        """Whether anybody lacks a gradient."""
        return any(word.unused for word in self.words)

    def bad_ranks(self) -> list[int]:
        """Workers whose loss is not a number."""
        return [rank for rank, word in enumerate(self.words) if word.bad]


class PendingReports(NamedTuple):
    """A table under way."""

    everyone: Tensor
    work: dist.Work | None
    copies: int = 1

    def wait(self) -> StepReports:
        """The table."""
        if self.work is not None:
            self.work.wait()
        return read_reports(self.everyone, copies=self.copies)


def read_reports(numbers: Tensor, *, copies: int = 1) -> StepReports:
    """Everybody's word, from their numbers one after the other."""
    return StepReports(
        tuple(StepReport(*row) for row in numbers.view(-1, REPORT_WIDTH).tolist()), copies
    )


def write_report(word: StepReport, numbers: Tensor, worker: int) -> None:
    """Write my word into its own place; a sum over workers then holds everybody's."""
    row = [0.0] * numbers.numel()
    row[REPORT_WIDTH * worker : REPORT_WIDTH * (worker + 1)] = word
    numbers.copy_(torch.tensor(row, dtype=numbers.dtype))


def gather_reports(word: StepReport, *, size: int, copies: int = 1) -> PendingReports:
    """Say my word and ask for everybody's.

    Args:
        word: mine.
        size: how many ranks speak.
        copies: how many of them speak of the same samples.
    """
    mine = torch.tensor(word, dtype=torch.float64)
    if size == 1:
        return PendingReports(mine, None)
    everyone = torch.empty(size * REPORT_WIDTH, dtype=torch.float64)
    return PendingReports(everyone, gather_flat(everyone, mine, async_op=True), copies)


class UnusedParameters(NamedTuple):
    """Under way: which parameters got a gradient on no worker."""

    names: list[str]
    present: Tensor
    work: dist.Work | None

    def wait(self) -> set[str]:
        """Their names."""
        if self.work is not None:
            self.work.wait()
        seen = self.present.tolist()
        return {name for name, here in zip(self.names, seen, strict=True) if not here}


def find_unused(
    unused: set[str], names: list[str], group: dist.ProcessGroup | None
) -> UnusedParameters:
    """Say whose gradient did not come to me, and ask whose came to nobody."""
    present = torch.tensor([name not in unused for name in names], dtype=torch.uint8)
    if group is None and not dist.is_initialized():
        return UnusedParameters(names, present, None)
    work = dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group, async_op=True)
    return UnusedParameters(names, present, work)


def nonfinite(what: str, step: int, ranks: list[int]) -> NonFinite:
    """The error that names step and ranks."""
    who = "rank " + ", ".join(map(str, ranks)) if ranks else "all ranks"
    return NonFinite(
        f"{what} is NaN or inf at step {step} on {who}: lower the learning rate, clip, or look at "
        "that batch; nonfinite='skip' leaves such steps out on all workers"
    )


class StepStats:
    """Samples and losses of the step under way.

    Args:
        weighted: gradients are summed over workers, not averaged, so weights sum to one.
        together: all workers' samples make one batch; else each weighs its own.
        shards: ranks of one replica that see samples of their own.
    """

    def __init__(self, *, weighted: bool, together: bool, shards: int = 1) -> None:
        self.weighted = weighted
        self.together = together
        self.shards = shards
        self.noted = 0  # batches opened and losses noted, ever
        self.passing = False  # a micro-batch is in the user's hands
        self.clear()

    def clear(self) -> None:
        """A new step; while a micro-batch passes, it is over the same batch (GANs)."""
        self.losses: list[tuple[Tensor, int]] = []
        if self.passing:
            return
        self.mine = self.micro = 0
        self.total: Callable[[], int] = int
        self.guess = 0  # of the total, made without asking; 0: none was needed
        self.known = False
        self.last = False

    def open(self, mine: int, total: Callable[[], int]) -> None:
        """A step over a batch of ``mine`` samples here and ``total()`` everywhere."""
        if self.passing:
            raise UsageError(
                "run.micro (or run.step) inside a loop over run.micro: its samples would be"
                " weighed twice; cut the batch once, with run.micro(batch, parts=...)"
            )
        self.mine, self.total, self.known = mine, total, True
        self.noted += 1

    def note(self, loss: Tensor, samples: int) -> None:
        """The backward of a micro-batch ran."""
        self.losses.append((loss, samples))
        self.noted += 1

    def scale(self, samples: int, workers: int) -> float:
        """Factor of a micro-batch's mean loss, so that agreed gradients are the exact mean."""
        if not self.known:  # a loop of one's own: every worker weighs the same
            return 1 / workers if self.weighted else 1.0
        if not self.together:  # a replica's own batch; torch takes the mean over its shards
            return samples / max(self.total(), 1) * self.shards
        return samples / self.total() * (1 if self.weighted else workers)

    def word(self, *more: tuple[Tensor, int]) -> StepReport:
        """My word on the step, with losses whose backward is yet to come."""
        losses = [*self.losses, *more]
        loss = sum(float(loss) * samples for loss, samples in losses)
        seen = sum(samples for _, samples in losses)
        bad = not math.isfinite(loss)
        return StepReport(0.0 if bad else loss, float(seen), 0.0, float(bad))


class Step:
    """One optimizer step of all workers.

    Args:
        number: counted from 0.
        table: what all workers said of it, under way until somebody asks.
        skipped: left out by all workers, for a NaN or inf.
        norm: of the agreed gradient before clipping, where it was measured.
    """

    def __init__(
        self,
        number: int,
        table: Callable[[], StepReports],
        *,
        skipped: bool = False,
        norm: float | None = None,
    ) -> None:
        self.number = number
        self.skipped = skipped
        self.norm = norm
        self._ask = table

    @cached_property
    def _table(self) -> StepReports:
        return self._ask()

    @property
    def loss(self) -> float:
        """Mean over the global batch.

        Over my own where workers do not wait for each other, and between the exchanges of
        ``local(h)``.
        """
        return self._table.loss

    @property
    def samples(self) -> int:
        """In the global batch, or in mine as above."""
        return self._table.samples

    def __repr__(self) -> str:
        return f"Step({self.number}, loss={self.loss:.6g}, samples={self.samples})"
