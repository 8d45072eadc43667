"""Read this worker's part of each global batch of a dataset, with torch's DataLoader.

Of a map-style dataset a worker reads only its own samples. Of a stream (any other iterable) every
worker reads all samples and keeps its part. Both sources yield a `LocalBatch`, so the loader treats
them alike.

A worker whose part of a small last batch is empty still gets a batch, because it must take part in
the step. One sample is read, collated, and cut to no rows. The sample stays if it cannot be cut, or
if ``DataShard.stands_in`` is true: that rank holds a part of the model and must run forward and
backward with real data. ``LocalBatch.ids`` is empty in all these cases, and the step must give
the batch weight zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from shoal.errors import UsageError
from shoal.samples.order import SampleRange, batches, mix, order, part
from shoal.samples.reader import BatchSlice, IndexedSamples, SampleReader, data_loader, empty_batch

UNKNOWN = -1  # the length of a stream without a length


class LocalBatch(NamedTuple):
    """One worker's part of one global batch, which has ``total`` samples."""

    batch: Any
    ids: Sequence[int]
    total: int


def source(dataset: Any, plan: BatchSlice) -> IndexedSource | StreamSource:
    """Return an IndexedSource if ``dataset`` is map-style and has a length, else a StreamSource."""
    if isinstance(dataset, DataLoader):
        raise UsageError("a DataLoader is not a dataset; pass its .dataset, which Shoal batches")
    streams = isinstance(dataset, IterableDataset)
    if not streams and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return IndexedSource(dataset, plan)
    if isinstance(dataset, Iterable):
        return StreamSource(dataset, plan)
    raise UsageError(
        f"{type(dataset).__name__} is not a dataset: it must have __getitem__ and __len__, or be"
        " iterable"
    )


class IndexedSource:
    """A map-style dataset: each worker reads its own samples only."""

    def __init__(self, dataset: Any, plan: BatchSlice) -> None:
        self.length = len(dataset)
        if self.length == 0:
            raise UsageError(f"dataset is empty: len({type(dataset).__name__}) is 0")
        self._dataset, self._plan = dataset, plan

    def batches(self, epoch: int, start: int) -> Iterator[LocalBatch]:
        """Yield this worker's batches of one epoch from position ``start`` on."""
        _set_epoch(self._dataset, epoch)
        if len(self._dataset) != self.length:
            raise UsageError(
                f"the dataset had {self.length} samples and has {len(self._dataset)} in epoch"
                f" {epoch}: its length must not change; make a new loader for the new data"
            )
        plan, options = self._plan, self._plan.options
        seed = options.seed
        epoch_order = order(self.length, seed=seed, epoch=epoch, shuffle=options.shuffle)
        sampler = (  # this worker's indices of each batch, or one index if its part is empty
            _ids(epoch_order, part(span, plan.share))
            or _ids(epoch_order, SampleRange(span.start, span.start + 1))
            for span in self._spans(start)
        )
        samples = IndexedSamples(self._dataset, mix(seed, epoch) if options.augments else None)
        key = (epoch, start, plan.share.index)
        loader = data_loader(samples, plan, key=key, batch_sampler=sampler)
        for batch, span in zip(loader, self._spans(start), strict=True):
            ids = _ids(epoch_order, part(span, plan.share))
            yield LocalBatch(_part_of(batch, ids, plan), ids, span.size)

    def _spans(self, start: int) -> Iterator[SampleRange]:
        drops = self._plan.options.drop_last
        return batches(SampleRange(start, self.length), self._plan.batch_size, drop_last=drops)


class StreamSource:
    """An iterable dataset: each worker reads all samples and keeps its part of each batch."""

    def __init__(self, dataset: Iterable[Any], plan: BatchSlice) -> None:
        self.length = UNKNOWN
        with suppress(TypeError, NotImplementedError):  # no __len__, or one that raises
            self.length = len(dataset)  # type: ignore[arg-type]
        if plan.options.processes > 1:
            raise UsageError(
                f"processes={plan.options.processes}: a stream is read by one process, since two"
                " would each yield all of it; pass processes=1 or 0, or a map-style dataset"
            )
        self._once = isinstance(dataset, Iterator)
        if self._once and plan.options.epochs > 1:
            raise UsageError(
                f"epochs={plan.options.epochs}: a {type(dataset).__name__} can be read only once;"
                " pass an iterable that starts again, or epochs=1"
            )
        self._dataset, self._plan, self._opened = dataset, plan, False

    def batches(self, epoch: int, start: int) -> Iterator[LocalBatch]:
        """Yield this worker's batches of one epoch from position ``start`` on."""
        if self._once and self._opened:
            raise UsageError(
                f"a {type(self._dataset).__name__} can be read only once, and some of it has been"
                " read; pass an iterable that starts again, such as a list or an IterableDataset"
            )
        self._opened = True
        _set_epoch(self._dataset, epoch)
        plan = self._plan
        reader = SampleReader(self._dataset, plan, epoch=epoch, start=start)
        position = start
        for batch, total in data_loader(reader, plan, key=(epoch,), batch_size=None):
            ids = range(*part(SampleRange(position, position + total), plan.share))
            position += total
            yield LocalBatch(_part_of(batch, ids, plan), ids, total)
        if position == 0:
            few = f"fewer than {plan.batch_size} samples, all dropped by drop_last"
            count = few if plan.options.drop_last else "no samples"
            raise UsageError(f"dataset is empty: the stream yielded {count} in epoch {epoch}")


def _ids(epoch_order: Tensor | range, span: SampleRange) -> list[int]:
    ids = epoch_order[span.start : span.stop]
    return ids.tolist() if isinstance(ids, Tensor) else list(ids)


def _set_epoch(dataset: Any, epoch: int) -> None:
    """Call ``set_epoch`` if the dataset has it. Datasets of Hugging Face use it to shuffle."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def _part_of(batch: Any, ids: Sequence[int], plan: BatchSlice) -> Any:
    """Return the batch, cut to no samples if ``ids`` is empty and ``stands_in`` is False."""
    return batch if ids or plan.share.stands_in else empty_batch(batch)
