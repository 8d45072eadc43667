"""A loader inside a run: its waits are spans, its position is saved with the run.

Numbers that all workers of a run share: samples of a batch, and whatever the user asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import UnknownName
from shoal.runtime.context import RunContext
from shoal.runtime.world.error_context import ErrorContext
from shoal.samples.batch import count, split
from shoal.samples.loader import Loader, make

if TYPE_CHECKING:
    from shoal.runtime.run import Run


class RunLoader:
    """Iterates a loader and notes how long each batch took to come.

    Args:
        loader: my part of the data.
        context: whose recorder notes it.

    Attributes:
        number: of the step to come.
        busy: a batch was yielded and the loop has not asked for the next.
        opening: called before the first batch of a loop.
        closing: called when the loop is done with a batch.
    """

    def __init__(self, loader: Loader, context: RunContext) -> None:
        self.loader = loader
        self.context = context
        self.number = 0
        self.busy = False
        self.opening: Callable[[], None] = _nothing
        self.closing: Callable[[], None] = _nothing

    @classmethod
    def made(
        cls, dataset: Any, batch_size: int, *, context: RunContext, options: Mapping[str, Any]
    ) -> RunLoader:
        """A feed over a new loader."""
        return cls(make(dataset, batch_size, share=context.data_shard, **options), context)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.opening()
        start = time.perf_counter()
        for batch in self.loader:
            seconds = time.perf_counter() - start
            self.context.recorder.add("data", "next batch", start, seconds, 0, self.number)
            self.busy = True
            try:
                yield batch
            finally:  # a loop may also be left
                self.busy = False
            self.closing()
            start = time.perf_counter()

    def by_epoch(self) -> Iterator[tuple[int, Iterator[Any]]]:
        """Epoch after epoch, each with its batches: what comes between them survives a restart.

        ``for epoch, batches in feed.by_epoch(): ...`` A resumed run goes on inside the epoch where
        it stood, and does not repeat what followed the ones before.
        """
        self.loader.turn_page()
        while self.loader.epoch < self.loader.options.epochs:
            yield self.loader.epoch, self._to_the_end_of_the_epoch()

    def _to_the_end_of_the_epoch(self) -> Iterator[Any]:
        for batch in self:
            yield batch
            if self.loader.turn_page():
                self.closing()
                return

    @property
    def epoch(self) -> int:
        """The epoch of the last batch."""
        return self.loader.epoch

    def state_dict(self) -> dict[str, int]:
        """Where in the data we stand."""
        return self.loader.state_dict()

    def check(self, state: Mapping[str, int]) -> None:
        """Refuse another loader's state, without going there."""
        self.loader.check(state)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there."""
        self.loader.load_state_dict(state)


def _nothing() -> None:
    """A loader outside of a run has nothing to do in between."""


How = Literal["mean", "sum", "max", "min"]
OPS = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def counts(run: Run, batch: Any) -> tuple[int, Callable[[], int]]:
    """Samples in my batch, and in everybody's: known, or asked for while forward computes."""
    feed = next((feed for feed in run.feeds if feed.loader.last is batch), None)
    mine = count(batch) if feed is None else feed.loader.mine
    if not run.tally.together:
        return mine, _of_replica(run, mine)
    if feed is not None:
        return mine, partial(int, feed.loader.total)
    if run.context.data_shard.count == 1:
        return mine, partial(int, mine)
    if run.updater.total:  # as last time, and put right afterwards where that was wrong
        run.tally.guess = run.updater.total
        return mine, partial(int, run.updater.total)
    copies = run.size // run.context.data_shard.count  # tensor and pipe ranks see the same samples
    told = torch.tensor(float(mine), dtype=torch.float64)
    work = dist.all_reduce(told, group=_side(run), async_op=True)
    return mine, partial(_counted, run, told, work, copies)


def _of_replica(run: Run, mine: int) -> Callable[[], int]:
    """Samples of my replica, which decides alone what its step is."""
    if run.context.mesh is None or run.tally.shards == 1:
        return partial(int, mine)
    told = torch.tensor(float(mine), dtype=torch.float64)
    work = dist.all_reduce(told, group=run.context.mesh["dp_shard"].get_group(), async_op=True)
    return partial(_counted, run, told, work, 1)


def pieces(run: Run, batch: Any, mine: int, parts: int) -> list[tuple[Any, int]]:
    """Micro-batches of my batch, each with its samples.

    Ranks that share a model make equally many, so that their gathers meet: who has fewer samples
    adds some that weigh nothing.
    """
    share = run.context.data_shard
    cut = [batch] if parts == 1 else split(batch, parts, rows=mine) if mine else []
    made = [(piece, mine if len(cut) == 1 else count(piece)) for piece in cut if mine]
    if not share.stands_in:
        return made
    sharing = share.count if run.tally.together else run.tally.shards
    most = -(-run.tally.total() // sharing)  # samples of whoever has most
    idle = split(batch, max(mine, 1), rows=max(mine, 1))[0]
    return made + [(idle, 0)] * (min(parts, most) - len(made))


def _counted(run: Run, told: Tensor, work: dist.Work | None, copies: int) -> int:
    if work is not None:
        with ErrorContext(run.context.world, run.steps, "samples"):
            work.wait()
    return round(float(told) / copies)


def agree(run: Run, value: float | bool, how: How) -> float:
    """One number of all workers'."""
    if how not in OPS:
        raise UnknownName("way to agree", how, OPS)
    if run.size == 1:
        return float(value)
    with ErrorContext(run.context.world, run.steps, "agree"):
        told = torch.tensor(float(value), dtype=torch.float64)
        dist.all_reduce(told, op=OPS[how], group=_side(run))
    return float(told) / (run.size if how == "mean" else 1)


def _side(run: Run) -> dist.ProcessGroup:
    """A group beside that of the gradients, in which a question may come at any moment.

    In the middle of a step one rank's gradients are under way and another's are not: in one group
    the question would meet a gradient.
    """
    if run.side is None:
        limit = timedelta(seconds=run.context.world.seconds)
        run.side = dist.new_group(backend="gloo", timeout=limit)
    side: dist.ProcessGroup = run.side
    return side
