"""The loader keeps a cursor (position) in an order that is the same for any number of workers.

``batch_size`` is the size of the global batch. Each worker gets a contiguous part of it. The parts
do not overlap, their sizes differ by at most one, and together they are the batch. The cursor
counts global samples. So it can be restored on another number of workers, or with another batch
size, and the loader continues in the same order.

A loader is iterated once, through all epochs::

    for batch in loader:            # loader.epoch, loader.mine, loader.total, loader.ids
        ...

If a loop ends early, the next loop continues with the batch after the last one yielded. After all
epochs, another loop raises an error, because it would silently train nothing. To train more, pass a
larger ``epochs``, or call ``reset()`` to begin at epoch 0 in the same order. As an exception,
the first loop after restoring the state of a finished loader yields nothing and raises nothing.
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
    """Return a loader. ``options`` are fields of `LoaderOptions`.

    >>> [batch.tolist() for batch in make(range(5), 2, shuffle=False)]
    [[0, 1], [2, 3], [4]]
    """
    return Loader(dataset, batch_size, share=share, options=LoaderOptions.named(options))


class Loader:
    """Yields this worker's part of each global batch, and keeps the cursor.

    Attributes:
        mine: number of samples in the part yielded last. With 0, the step must give it weight zero.
        total: number of samples in the global batch to which that part belongs.
        last: the batch yielded last, or None before the first one.
        ids: dataset indices (map-style) or stream positions of the samples yielded last.
        epoch: the epoch in which the cursor is, or the number of epochs if all have been read.
    """

    mine: int
    total: int
    last: Any
    ids: Sequence[int]
    epoch: int
    _position: int  # number of global samples yielded in this epoch; prefetched ones do not count
    _moved: bool  # whether the cursor was set, so that a running loop must continue from there
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
                f"batch_size={batch_size} is the global batch size, but {share.count} workers share"
                " it, so some would get nothing; raise batch_size or use fewer workers"
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
        """Return the number of global batches in all epochs, whatever the cursor is."""
        if self._source.length == UNKNOWN:
            # Not a UsageError: list(loader) calls len() as a hint, and ignores only a TypeError.
            raise TypeError("a loader over a stream of unknown length has no len()")
        drop_last = self.options.drop_last
        batches = batch_count(self._source.length, self.batch_size, drop_last=drop_last)
        return self.options.epochs * batches

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's batches from the cursor to the end of the last epoch."""
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
                # Move on before the yield, so that a state saved in the loop includes this batch.
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
        """Go to the next epoch if this one has no batch left. Return whether the epoch changed."""
        if self._source.length == UNKNOWN:
            raise UsageError(
                "cannot tell where an epoch of a stream of unknown length ends; loop over the"
                " loader itself, or give the dataset a __len__"
            )
        least = self.batch_size if self.options.drop_last else 1
        if self._source.length - self._position >= least:
            return False
        self._set_cursor(self.epoch + 1, 0)
        self._ended = self.epoch >= self.options.epochs
        return True

    def state_dict(self) -> dict[str, int]:
        """Return the cursor, in global samples. The batch yielded last counts as consumed."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "seed": self.options.seed,
            "length": self._source.length,
            "shuffle": int(self.options.shuffle),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Set the cursor to a saved one. Number of workers and batch size may have changed."""
        self.check(state)
        self._set_cursor(state["epoch"], state["position"])

    def check(self, state: Mapping[str, int]) -> None:
        """Raise a CheckpointMismatch if ``state`` is invalid, or if its data or order differ."""
        own = self.state_dict()
        missing = [name for name in own if not isinstance(state.get(name), int)]
        if missing:
            names = ", ".join(missing)
            raise CheckpointMismatch(f"this is not the state of a loader: no int for {names}")
        for name in _MUST_AGREE:
            if state[name] != own[name]:
                raise CheckpointMismatch(
                    f"the loader was saved with {name} {state[name]}, but has {own[name]} now, so"
                    " the order of samples would differ; pass the dataset and options of the save"
                )
        epoch, position, length = state["epoch"], state["position"], state["length"]
        beyond = length != UNKNOWN and position > length
        if epoch < 0 or position < 0 or beyond:
            raise CheckpointMismatch(
                f"the saved loader state is invalid: epoch {epoch}, position {position} of {length}"
            )

    def _set_cursor(self, epoch: int, position: int) -> None:
        self.epoch, self._position = epoch, position
        self._moved, self._ended = True, False

    def _check_length(self) -> None:
        """Warn if batch_size exceeds the dataset. Raise if drop_last would drop all samples."""
        length = self._source.length
        if length == UNKNOWN or self.batch_size <= length:
            return
        excess = f"batch_size={self.batch_size} exceeds the {length} samples of the dataset"
        if self.options.drop_last:
            raise UsageError(f"{excess}, so drop_last would drop all samples; lower batch_size")
        if self.share.index == 0:
            warnings.warn(f"{excess}, so every epoch is one batch of {length}", stacklevel=3)
