"""The loader: a cursor over one global order of samples, the same for any number of workers.

``batch_size`` is global. Worker i gets a contiguous, fair part of each global batch; parts never
overlap, and their union is the batch. The cursor counts global samples, so it can be restored on
another number of workers, or with another batch size, and continues in the same order.

A loader is iterated once, through all epochs::

    for batch in loader:            # loader.epoch, loader.mine, loader.total, loader.ids
        ...

After a loop that ends early, the next one continues at the batch after the last one yielded. After
all epochs, another loop is an error, rather than silently no training: pass a larger ``epochs``, or
call ``reset()`` to begin at epoch 0 in the same order. The one exception is the first loop after
restoring a finished state: it yields nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.errors import CheckpointMismatch, UsageError
from shoal.samples.options import LoaderOptions, check_int
from shoal.samples.order import ALONE, DataShard, batch_count
from shoal.samples.reader import BatchSlice
from shoal.samples.source import UNKNOWN, source

_MUST_AGREE = ("seed", "length", "shuffle")


def make(dataset: Any, batch_size: int, *, share: DataShard = ALONE, **options: Any) -> Loader:
    """Return a loader, with the fields of `LoaderOptions` as keyword arguments.

    >>> [batch.tolist() for batch in make(range(5), 2, shuffle=False)]
    [[0, 1], [2, 3], [4]]
    """
    return Loader(dataset, batch_size, share=share, options=LoaderOptions.named(options))


class Loader:
    """Yields the batches of this worker; a cursor over the data.

    Attributes:
        mine: samples in this worker's part of the last batch; with 0 it has weight zero.
        total: samples in the whole of that global batch.
        last: the object yielded last; None before the first.
        ids: dataset indices (map-style) or stream positions of this worker's part.
        epoch: the epoch of the last batch; after the end, the number of epochs.
    """

    mine: int
    total: int
    last: Any
    ids: Sequence[int]
    epoch: int
    _position: int  # global samples of this epoch yielded, without prefetched ones
    _moved: bool  # the cursor was set from outside, so a running loop must reopen its source
    _ended: bool

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        share: DataShard = ALONE,
        options: LoaderOptions | None = None,
    ) -> None:
        self.share, self.options = share, options or LoaderOptions()
        self.batch_size = check_int("batch_size", batch_size, least=1)
        if batch_size < share.count:
            raise UsageError(
                f"batch_size={batch_size} is global and smaller than the {share.count} workers"
                " that share it: raise batch_size or use fewer workers"
            )
        self._source = source(dataset, BatchSlice(batch_size, share, self.options))
        self._check_length()
        self._loops = 0
        self.reset()

    def reset(self) -> None:
        """Go back to the first batch of epoch 0; a running loop continues from there."""
        self.mine, self.total = 0, 0
        self.last, self.ids = None, ()
        self._set_cursor(0, 0)

    def __len__(self) -> int:
        """Return the number of global batches in all epochs, wherever the cursor is."""
        if self._source.length == UNKNOWN:
            # Not a UsageError: list(loader) asks for a length hint, and ignores only a TypeError.
            raise TypeError("a loader over a stream of unknown length has no len()")
        drop_last = self.options.drop_last
        batches = batch_count(self._source.length, self.batch_size, drop_last=drop_last)
        return self.options.epochs * batches

    def __iter__(self) -> Iterator[Any]:
        """Yield from the cursor to the end of the last epoch."""
        if self._ended:
            raise UsageError(
                f"all {self.options.epochs} epochs of this loader have been read: pass a larger"
                " epochs=, or call reset() to begin again"
            )
        self._loops += 1
        loop = self._loops
        while self.epoch < self.options.epochs:
            self._moved = False
            for local in self._source.batches(self.epoch, self._position):
                # before the yield: a state that is saved in the loop's body is after this batch
                self._position += local.total
                self.mine, self.total = len(local.ids), local.total
                self.last, self.ids = local.batch, local.ids
                yield local.batch
                if loop != self._loops:
                    raise UsageError(
                        "another loop over the same loader has begun: a loader has one cursor; make"
                        " a second loader to read the data twice at once"
                    )
                if self._moved:
                    break
            else:
                self.epoch, self._position = self.epoch + 1, 0
        self._ended = True

    def finish_epoch(self) -> bool:
        """At the end of an epoch, go to the start of the next; return whether it was the end."""
        if self._source.length == UNKNOWN:
            raise UsageError(
                "a stream of unknown length does not say where an epoch ends: loop over the loader"
                " itself, or give the dataset a __len__"
            )
        least = self.batch_size if self.options.drop_last else 1
        if self._source.length - self._position >= least:
            return False
        self._set_cursor(self.epoch + 1, 0)
        self._ended = self.epoch >= self.options.epochs
        return True

    def state_dict(self) -> dict[str, int]:
        """Return the cursor, in global samples; the batch yielded last counts as consumed."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "seed": self.options.seed,
            "length": self._source.length,
            "shuffle": int(self.options.shuffle),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a cursor that was saved on any number of workers with any batch size."""
        self.check(state)
        self._set_cursor(state["epoch"], state["position"])

    def check(self, state: Mapping[str, int]) -> None:
        """Refuse a cursor into other data or another order; the loader's own does not move."""
        own = self.state_dict()
        missing = [name for name in own if not isinstance(state.get(name), int)]
        if missing:
            raise CheckpointMismatch(f"not a loader's state: no int for {', '.join(missing)}")
        for name in _MUST_AGREE:
            if state[name] != own[name]:
                raise CheckpointMismatch(
                    f"the loader was saved with {name} {state[name]} and has {own[name]}: the"
                    " order of samples would differ; pass the same dataset and options as then"
                )
        epoch, position, length = state["epoch"], state["position"], state["length"]
        beyond = length != UNKNOWN and position > length
        if epoch < 0 or position < 0 or beyond:
            raise CheckpointMismatch(
                f"a loader's state points to epoch {epoch}, position {position} of {length} samples"
            )

    def _set_cursor(self, epoch: int, position: int) -> None:
        self.epoch, self._position = epoch, position
        self._moved, self._ended = True, False

    def _check_length(self) -> None:
        """Warn of a batch larger than the dataset; refuse one that drop_last would drop."""
        length = self._source.length
        if length == UNKNOWN or self.batch_size <= length:
            return
        excess = f"batch_size={self.batch_size} exceeds the {length} samples of the dataset"
        if self.options.drop_last:
            raise UsageError(f"{excess}, so drop_last would drop all: lower batch_size")
        if self.share.index == 0:
            warnings.warn(f"{excess}: every epoch is one batch of {length}", stacklevel=3)
