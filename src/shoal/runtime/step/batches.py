"""Load batches, count the samples of a step on all ranks, and cut micro-batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from shoal import rules
from shoal.errors import UnknownName
from shoal.runtime.context import RunContext
from shoal.runtime.world.error_context import ErrorContext
from shoal.samples.batch import count, split
from shoal.samples.loader import Loader, make

How = Literal["mean", "sum", "max", "min"]
_OP = dist.ReduceOp
OPS = {"mean": _OP.SUM, "sum": _OP.SUM, "max": _OP.MAX, "min": _OP.MIN}


class RunLoader:
    """Yields this rank's batches, and records in the timeline how long the loop waits for them.

    Attributes:
        step: the number of the next step.
        busy: whether the loop is using a batch, so that its step may not be over.
        on_start: a function that is called before the first batch of a loop.
        on_batch_done: a function that is called when the loop asks for the next batch, or when an
            epoch ends.
    """

    def __init__(self, loader: Loader, context: RunContext) -> None:
        self.loader, self.context = loader, context
        self.step, self.busy = 0, False
        self.on_start: Callable[[], None] = lambda: None
        self.on_batch_done: Callable[[], None] = lambda: None

    @classmethod
    def over(
        cls, dataset: Any, batch_size: int, *, context: RunContext, options: Mapping[str, Any]
    ) -> RunLoader:
        """Make a loader over this rank's shard of a dataset."""
        return cls(make(dataset, batch_size, share=context.data_shard, **options), context)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.on_start()
        start = time.perf_counter()
        for batch in self.loader:
            seconds = time.perf_counter() - start
            self.context.recorder.add("data", "next batch", start, seconds, 0, self.step)
            self.busy = True
            try:
                yield batch
            finally:  # also if the loop ends by break
                self.busy = False
            self.on_batch_done()
            start = time.perf_counter()

    def by_epoch(self) -> Iterator[tuple[int, Iterator[Any]]]:
        """Yield (number of the epoch, iterator over its batches) for each epoch.

        ``for epoch, batches in loader.by_epoch(): ...`` A resumed run starts inside the epoch in
        which it was saved, so code that runs after each epoch does not run again for earlier ones.
        """
        self.loader.finish_epoch()
        while self.loader.epoch < self.loader.options.epochs:
            yield self.loader.epoch, self._rest_of_epoch()

    def _rest_of_epoch(self) -> Iterator[Any]:
        for batch in self:
            yield batch
            if self.loader.finish_epoch():
                self.on_batch_done()
                return

    @property
    def epoch(self) -> int:
        """The number of the current epoch."""
        return self.loader.epoch

    def state_dict(self) -> dict[str, int]:
        """Return the position behind the last batch that was yielded."""
        return self.loader.state_dict()

    def check(self, state: Mapping[str, int]) -> None:
        """Raise if a saved position does not fit this loader. Do not change the position."""
        self.loader.check(state)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Move to a saved position."""
        self.loader.load_state_dict(state)


@dataclass
class RunPosition:
    """The number of steps taken, and the loaders of the run in the order of their creation."""

    steps: int = 0
    loaders: list[RunLoader] = field(default_factory=list)


class Batches:
    """Counts the samples of a step on all ranks, and cuts batches into micro-batches."""

    def __init__(self, context: RunContext, position: RunPosition) -> None:
        self.context, self.position = context, position
        self._together = rules.sends_gradients(context.strategy)  # all workers' batches form one
        self._shards = context.strategy.partition.shard

    def counts(self, batch: Any) -> tuple[int, Callable[[], int]]:
        """Return the number of samples on this rank, and a function that returns the total.

        The total is over all workers if their batches form one, otherwise over this replica. For a
        batch of ``run.loader`` the total over all workers is known. In other cases with several
        ranks, an all-reduce runs during forward.
        """
        loader = next((each for each in self.position.loaders if each.loader.last is batch), None)
        samples = count(batch) if loader is None else loader.loader.mine
        if not self._together:
            mesh = self.context.mesh
            if mesh is None or self._shards == 1:
                return samples, partial(int, samples)
            return samples, self._sum(samples, mesh["dp_shard"].get_group(), copies=1)
        if loader is not None:
            return samples, partial(int, loader.loader.total)
        if self.context.data_shard.count == 1:
            return samples, partial(int, samples)
        return samples, self._sum(samples, self._side_group, copies=self.context.copies)

    def _sum(self, samples: int, group: dist.ProcessGroup, *, copies: int) -> Callable[[], int]:
        """Start an all-reduce of ``samples``, and return a function that waits for the total.

        Each sample is read by ``copies`` ranks of the group, but counts once.
        """
        number = torch.tensor(float(samples), dtype=torch.float64)
        work = dist.all_reduce(number, group=group, async_op=True)

        def wait() -> int:
            if work is not None:
                with ErrorContext(self.context.world, self.position.steps, "samples"):
                    work.wait()
            return round(float(number) / copies)

        return wait

    def split(
        self, batch: Any, samples: int, total: Callable[[], int], parts: int
    ) -> list[tuple[Any, int]]:
        """Cut a batch into at most ``parts`` micro-batches. Return each with its sample count.

        Ranks of one replica need the same number of micro-batches, because they communicate in
        forward and backward. A rank with fewer samples adds micro-batches that count 0 samples.
        """
        shard = self.context.data_shard
        pieces = [batch] if parts == 1 else split(batch, parts, rows=samples) if samples else []
        micro = [(p, samples if len(pieces) == 1 else count(p)) for p in pieces if samples]
        if not shard.stands_in:
            return micro
        sharing = shard.count if self._together else self._shards
        most = -(-total() // sharing)  # samples on the rank with the most samples
        idle = split(batch, max(samples, 1), rows=max(samples, 1))[0]
        return micro + [(idle, 0)] * (min(parts, most) - len(micro))

    def reduce(self, value: float | bool, how: How) -> float:
        """Return the mean, sum, max or min of all ranks' values. All ranks must call this."""
        if how not in OPS:
            raise UnknownName("way to agree", how, OPS)
        size = self.context.world.size
        if size == 1:
            return float(value)
        with ErrorContext(self.context.world, self.position.steps, "agree"):
            number = torch.tensor(float(value), dtype=torch.float64)
            dist.all_reduce(number, op=OPS[how], group=self._side_group)
        return float(number) / (size if how == "mean" else 1)

    @cached_property
    def _side_group(self) -> dist.ProcessGroup:
        """A second process group, for numbers that are reduced while gradients are in transfer.

        In the group of the gradients, one rank might issue the number first and another rank a
        gradient first, so that the two would be summed.
        """
        limit = timedelta(seconds=self.context.world.seconds)
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=limit)
        return group
