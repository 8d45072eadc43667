"""Read and collate samples inside torch's DataLoader, in this process or its worker processes.

`IndexedSamples` reads a map-style dataset, `SampleReader` reads a stream, and `NamedCollate` makes
batches. If a single sample cannot be read, or does not fit the others, their errors name that
sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from shoal.errors import CheckpointMismatch, UsageError
from shoal.samples import randomness
from shoal.samples.batch import cut
from shoal.samples.options import Collate, LoaderOptions
from shoal.samples.order import DataShard, SampleRange, mix, part

MAX_SHOWN = 8


@dataclass(frozen=True)
class BatchSlice:
    """How batches are divided: their global size, this worker's share, and the loader's options."""

    batch_size: int
    share: DataShard
    options: LoaderOptions


class SampleList(list[Any]):
    """The samples of one batch, and their dataset indices or stream positions."""

    def __init__(self, samples: Sequence[Any], indices: Sequence[int]) -> None:
        super().__init__(samples)
        self.indices = indices


class IndexedSamples(Dataset[Any]):
    """A map-style dataset. If there is a seed, the generators are seeded before each sample."""

    def __init__(self, dataset: Any, seed: int | None) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return the samples. Without a seed, use the dataset's ``__getitems__`` if it exists."""
        return SampleList(self._read(indices), indices)

    def _read(self, indices: list[int]) -> list[Any]:
        if self._seed is not None:
            with randomness.fork_rng():
                return self._one_by_one(indices)
        read_many = getattr(self._dataset, "__getitems__", None)
        if read_many is None:
            return self._one_by_one(indices)
        try:
            return list(read_many(indices))
        except Exception as error:
            self._one_by_one(indices)  # if a single sample fails, this raises and names it
            raise UsageError(f"__getitems__({indices}) raised {error!r}") from error

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
    """Yields this worker's part of each global batch of one epoch of a stream, from a position on.

    Every worker reads the whole stream. The stream has random generators of its own, seeded by
    (seed, epoch), so that its samples are the same on every worker and after a restart. The
    generators of the model are not changed.
    """

    def __init__(self, stream: Iterable[Any], plan: BatchSlice, *, epoch: int, start: int) -> None:
        self._stream, self._plan = stream, plan
        self._epoch, self._position, self._start = epoch, 0, start
        self._states: randomness.GeneratorStates | None = None

    def __iter__(self) -> Iterator[tuple[list[Any], int]]:
        """Yield (samples, size of the global batch). If this worker has none, take one."""
        size, drops = self._plan.batch_size, self._plan.options.drop_last
        with self._own_generators():
            samples = iter(self._stream)
        self._skip(samples)
        while batch := self._read(samples, size):
            if drops and len(batch) < size:
                return
            own = part(SampleRange(0, len(batch)), self._plan.share)
            own = own if own.size else SampleRange(0, 1)
            indices = range(self._position - len(batch), self._position)[own.start : own.stop]
            yield SampleList(batch[own.start : own.stop], indices), len(batch)

    def _skip(self, samples: Iterator[Any]) -> None:
        while self._position < self._start:
            if not self._read(samples, min(self._plan.batch_size, self._start - self._position)):
                raise CheckpointMismatch(
                    f"the stream ended after {self._position} samples, before the saved position"
                    f" {self._start}, so it is not the stream that was saved; pass that stream, or"
                    " call reset() to begin at epoch 0"
                )

    def _read(self, samples: Iterator[Any], count: int) -> list[Any]:
        with self._own_generators():
            batch: list[Any] = []
            try:
                batch.extend(islice(samples, count))
            except Exception as error:
                raise UsageError(
                    f"sample {self._position + len(batch)} of the stream"
                    f" {type(self._stream).__name__} cannot be read: {error!r}"
                ) from error
        self._position += len(batch)
        return batch

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Use the stream's random generators inside the block, and restore the model's after it."""
        with randomness.fork_rng():
            if self._states is None:
                randomness.seed(mix(self._plan.options.seed, self._epoch))
            else:
                randomness.set_states(self._states)
            yield
            self._states = randomness.get_states()


@dataclass(frozen=True)
class NamedCollate:
    """A collate function whose errors name the first sample whose layout differs, if one does."""

    collate: Collate

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of these samples."""
        try:
            return self.collate(list(samples))
        except Exception as error:
            indices = samples.indices if isinstance(samples, SampleList) else range(len(samples))
            raise UsageError(
                f"{_difference(samples, indices)}, and collating them raised {error!r}; make all "
                "samples alike, or pass collate=..."
            ) from error


def _difference(samples: Sequence[Any], indices: Sequence[int]) -> str:
    """Return a text about the first sample that differs in layout, or about all if none does."""
    layouts = [_layout(sample) for sample in samples]
    for index, layout in zip(indices, layouts, strict=True):
        if layout != layouts[0]:
            return f"sample {index} is {layout}, but sample {indices[0]} is {layouts[0]}"
    more = ", ..." if len(indices) > MAX_SHOWN else ""
    return f"samples {', '.join(map(str, indices[:MAX_SHOWN]))}{more} are each {layouts[0]}"


def _layout(sample: Any) -> str:
    if sample is None:
        return "None"
    if isinstance(sample, Tensor):
        return f"a {str(sample.dtype).removeprefix('torch.')} tensor of shape {tuple(sample.shape)}"
    if isinstance(sample, tuple | list | Mapping) and len(sample) > MAX_SHOWN:
        return f"a {type(sample).__name__} of {len(sample)}"
    if isinstance(sample, tuple | list):
        return f"({', '.join(map(_layout, sample))})"
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {_layout(value)}" for key, value in sample.items()) + "}"
    return f"a {type(sample).__name__}"


@dataclass(frozen=True)
class StreamCollate:
    """Collates the samples that a :class:`SampleReader` yields."""

    collate: Collate

    def __call__(self, item: tuple[list[Any], int]) -> tuple[Any, int]:
        """Return (batch, size of the global batch)."""
        samples, total = item
        return self.collate(samples), total


def data_loader(
    dataset: Dataset[Any], plan: BatchSlice, *, key: tuple[int, ...], **sampling: Any
) -> Any:
    """Return a DataLoader whose processes are seeded by the loader's seed and ``key``.

    ``sampling`` are further arguments of DataLoader. The DataLoader gets its own generator,
    because by default it would use the global generator, which dropout uses.
    """
    options = plan.options
    collate: Any = NamedCollate(options.collate or default_collate)
    if isinstance(dataset, SampleReader):
        collate = StreamCollate(collate)
    return DataLoader(
        dataset,
        num_workers=options.processes,
        prefetch_factor=options.prefetch if options.processes else None,
        collate_fn=collate,
        pin_memory=options.pin_memory and torch.accelerator.is_available(),
        generator=torch.Generator().manual_seed(mix(options.seed, *key)),
        **sampling,
    )


def empty_batch(batch: Any) -> Any:
    """Return a batch of one sample, cut to no samples, or unchanged if it cannot be cut."""
    with suppress(UsageError):
        return cut(batch, 1, SampleRange(0, 0))
    return batch
