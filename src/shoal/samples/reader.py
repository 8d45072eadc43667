"""What runs inside torch's DataLoader, in this process or in its worker processes.

`Samples` reads a map-style dataset and says which sample could not be read. `SampleReader` reads a
stream to its end, keeps this worker's part of each global batch, and owns the stream's random
state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from shoal.errors import CheckpointMismatch, UsageError
from shoal.samples import randomness
from shoal.samples.batch import cut
from shoal.samples.collating import Named, Read
from shoal.samples.options import Collate, LoaderOptions
from shoal.samples.order import DataShard, SampleRange, mix, part


@dataclass(frozen=True)
class BatchSlice:
    """How a dataset is cut: the global batch, this worker among its peers, and the options."""

    batch_size: int
    share: DataShard
    options: LoaderOptions


class Samples(Dataset[Any]):
    """A map-style dataset whose errors name the sample, seeded sample by sample when asked to."""

    def __init__(self, dataset: Any, seed: int | None) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, index: int) -> Any:
        """One sample."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """All samples of a batch, by the dataset's own ``__getitems__`` if it has one."""
        return Read(self._read(indices), indices)

    def _read(self, indices: list[int]) -> list[Any]:
        if self._seed is not None:
            with randomness.borrowed():
                return self._one_by_one(indices)
        together = getattr(self._dataset, "__getitems__", None)
        if together is None:
            return self._one_by_one(indices)
        try:
            return list(together(indices))
        except Exception as error:
            self._one_by_one(indices)  # to name the one at fault
            raise UsageError(f"samples {indices} cannot be read together: {error!r}") from error

    def _one_by_one(self, indices: list[int]) -> list[Any]:
        samples: list[Any] = []
        try:
            for index in indices:
                if self._seed is not None:
                    randomness.seed(mix(self._seed, index))
                samples.append(self._dataset[index])
        except Exception as error:
            raise UsageError(
                f"sample {indices[len(samples)]} of {type(self._dataset).__name__} cannot be read:"
                f" {error!r}"
            ) from error
        return samples


class SampleReader(IterableDataset[Any]):
    """This worker's part of each global batch of one epoch of a stream, from a position on.

    The stream's random draws are seeded by (seed, epoch) and go on from batch to batch, apart from
    those of the model, so that every worker sees the same stream, also after a restart.
    """

    def __init__(self, stream: Iterable[Any], plan: BatchSlice, *, epoch: int, start: int) -> None:
        self._stream, self._plan = stream, plan
        self._epoch, self._position, self._start = epoch, 0, start
        self._states: randomness.Generators | None = None

    def __iter__(self) -> Iterator[tuple[list[Any], int]]:
        """Samples of my part (one stand-in when it is empty), and the size of the global batch."""
        size, drops = self._plan.batch_size, self._plan.options.drop_last
        with self._own_generators():
            samples = iter(self._stream)
        self._skip(samples)
        while taken := self._take(samples, size):
            if drops and len(taken) < size:
                return
            mine = part(SampleRange(0, len(taken)), self._plan.share)
            places = range(self._position - len(taken), self._position)
            kept = taken[mine.start : mine.stop] or taken[:1]
            yield Read(kept, places[mine.start : mine.stop] or places[:1]), len(taken)

    def _skip(self, samples: Iterator[Any]) -> None:
        while self._position < self._start:
            if not self._take(samples, min(self._plan.batch_size, self._start - self._position)):
                raise CheckpointMismatch(
                    f"the stream ended after {self._position} samples, before the saved position"
                    f" {self._start}: it is not the stream that was saved; call reset() to begin"
                )

    def _take(self, samples: Iterator[Any], count: int) -> list[Any]:
        with self._own_generators():
            taken: list[Any] = []
            try:
                taken.extend(islice(samples, count))
            except Exception as error:
                raise UsageError(
                    f"sample {self._position + len(taken)} of the stream"
                    f" {type(self._stream).__name__} cannot be read: {error!r}"
                ) from error
        self._position += len(taken)
        return taken

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        with randomness.borrowed():
            if self._states is None:
                randomness.seed(mix(self._plan.options.seed, self._epoch))
            else:
                randomness.restore(self._states)
            yield
            self._states = randomness.capture()


@dataclass(frozen=True)
class Sized:
    """A collate function that lets the size of the global batch through."""

    collate: Collate

    def __call__(self, item: tuple[list[Any], int]) -> tuple[Any, int]:
        """Collate the samples only."""
        samples, total = item
        return self.collate(samples), total


def opened(dataset: Dataset[Any], plan: BatchSlice, *, key: tuple[int, ...], **asks: Any) -> Any:
    """A DataLoader over ``dataset``, whose processes are seeded by the seed and ``key``.

    Its generator is its own: DataLoader would otherwise draw from the one that dropout uses.
    """
    options = plan.options
    collate: Any = Named(options.collate or default_collate)
    if isinstance(dataset, SampleReader):
        collate = Sized(collate)
    return DataLoader(
        dataset,
        num_workers=options.processes,
        prefetch_factor=options.prefetch if options.processes else None,
        collate_fn=collate,
        pin_memory=options.pin_memory and torch.accelerator.is_available(),
        generator=torch.Generator().manual_seed(mix(options.seed, *key)),
        **asks,
    )


def emptied(batch: Any) -> Any:
    """A batch of one sample cut to none; as it is when it cannot be cut."""
    with suppress(UsageError):
        return cut(batch, 1, SampleRange(0, 0))
    return batch
