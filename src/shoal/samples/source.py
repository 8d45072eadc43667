"""A dataset read in the global order by torch's DataLoader: this worker's part of each batch.

Map-style datasets are asked for this worker's samples only. A stream (anything iterable) cannot be
asked, so every worker reads all of it and keeps its part: exact for any number of workers, at the
price of reading the whole. Both give the same `Draw`, so the loader above knows no difference.

A worker whose part of a small last batch is empty still gets a batch, one sample collated and cut
to no rows, because it must take part in the step. A batch that cannot be cut is handed over whole;
``Draw.ids`` is empty either way, and the step must give it no weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from shoal.errors import UsageError
from shoal.samples.order import DataShard, SampleRange, batches, mix, order, part
from shoal.samples.reader import BatchSlice, SampleReader, Samples, emptied, opened

UNKNOWN = -1  # the length of a stream that has none


class Draw(NamedTuple):
    """One worker's part of one global batch."""

    batch: Any
    ids: Sequence[int]
    total: int


class Source(Protocol):
    """A dataset that can be read from any position of any epoch."""

    @property
    def length(self) -> int:
        """Samples an epoch, or `UNKNOWN`."""

    def draws(self, epoch: int, start: int) -> Iterator[Draw]:
        """The batches of one epoch from a position on."""


def source(dataset: Any, plan: BatchSlice) -> Source:
    """Read ``dataset`` by index when it has indices and a length, else as a stream."""
    if isinstance(dataset, DataLoader):
        raise UsageError("a DataLoader is not a dataset: pass its .dataset, and let Shoal batch it")
    streams = isinstance(dataset, IterableDataset)
    if not streams and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return Indexed(dataset, plan)
    if isinstance(dataset, Iterable):
        return Stream(dataset, plan)
    raise UsageError(
        f"{type(dataset).__name__} is not a dataset: it must have __getitem__ and __len__, or be"
        " iterable"
    )


class Indexed:
    """A map-style dataset: each worker reads its own samples and no others."""

    def __init__(self, dataset: Any, plan: BatchSlice) -> None:
        self.length = len(dataset)
        if self.length == 0:
            raise UsageError(f"dataset is empty: len({type(dataset).__name__}) is 0")
        self._dataset, self._plan = dataset, plan

    def draws(self, epoch: int, start: int) -> Iterator[Draw]:
        """Read this worker's samples; the order is told once to DataLoader, once to the ledger."""
        _announce(self._dataset, epoch)
        if len(self._dataset) != self.length:
            raise UsageError(
                f"the dataset had {self.length} samples and has {len(self._dataset)} in epoch"
                f" {epoch}: its length must not change; make a new loader for the new data"
            )
        plan, options = self._plan, self._plan.options
        seed = options.seed
        whole = order(self.length, seed=seed, epoch=epoch, shuffle=options.shuffle)
        asked = (_asked(whole, span, plan.share) for span in self._spans(start))
        samples = Samples(self._dataset, mix(seed, epoch) if options.augments else None)
        stream = opened(samples, plan, key=(epoch, start, plan.share.index), batch_sampler=asked)
        for batch, span in zip(stream, self._spans(start), strict=True):
            mine = part(span, plan.share)
            ids = _listed(whole, mine)
            yield Draw(_part_of(batch, ids, plan), ids, span.size)

    def _spans(self, start: int) -> Iterator[SampleRange]:
        drops = self._plan.options.drop_last
        return batches(SampleRange(start, self.length), self._plan.batch_size, drop_last=drops)


class Stream:
    """Anything iterable: each worker reads all of it and keeps its part of each batch."""

    def __init__(self, dataset: Iterable[Any], plan: BatchSlice) -> None:
        self.length = UNKNOWN
        with suppress(TypeError, NotImplementedError):  # a __len__ may be there and refuse
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

    def draws(self, epoch: int, start: int) -> Iterator[Draw]:
        """Skip to ``start``, then cut each global batch; an epoch of nothing is an error."""
        if self._once and self._opened:
            raise UsageError(
                f"a {type(self._dataset).__name__} can be read only once and has been begun: pass"
                " an iterable that starts again, such as a list or an IterableDataset"
            )
        self._opened = True
        _announce(self._dataset, epoch)
        plan = self._plan
        reader = SampleReader(self._dataset, plan, epoch=epoch, start=start)
        position = start
        for batch, total in opened(reader, plan, key=(epoch,), batch_size=None):
            mine = part(SampleRange(position, position + total), plan.share)
            position += total
            yield Draw(_part_of(batch, range(*mine), plan), range(*mine), total)
        if position == 0:
            few = f"fewer than {plan.batch_size} samples, all dropped by drop_last"
            said = few if plan.options.drop_last else "no samples"
            raise UsageError(f"dataset is empty: the stream yielded {said} in epoch {epoch}")


def _asked(whole: Tensor | range, span: SampleRange, share: DataShard) -> list[int]:
    """Samples to read for this worker's part; one stand-in when it is empty."""
    return _listed(whole, part(span, share)) or _listed(
        whole, SampleRange(span.start, span.start + 1)
    )


def _listed(whole: Tensor | range, span: SampleRange) -> list[int]:
    cut = whole[span.start : span.stop]
    return cut.tolist() if isinstance(cut, Tensor) else list(cut)


def _announce(dataset: Any, epoch: int) -> None:
    """Tell datasets that shuffle themselves which epoch it is, as Hugging Face's do."""
    tell = getattr(dataset, "set_epoch", None)
    if callable(tell):
        tell(epoch)


def _part_of(batch: Any, ids: Sequence[int], plan: BatchSlice) -> Any:
    """My part; of an empty one, what stands in for it."""
    return batch if ids or plan.share.stands_in else emptied(batch)
