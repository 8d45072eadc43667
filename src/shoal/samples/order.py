"""Which sample is where in an epoch, and which worker reads it: pure functions, no dataset.

The order of an epoch depends on (seed, epoch) alone, never on the number of workers. Position p of
that order is sample ``order(...)[p]``. A global batch is a range of positions; a worker's part is a
contiguous range within it. So any number of workers, from any position on, reads the same samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.errors import BadArgument


@dataclass(frozen=True)
class DataShard:
    """The index of this worker among ``count`` data-parallel workers.

    With ``stands_in`` an empty part is replaced by one sample of weight zero: this rank has a part
    of the model that others compute with, so it must compute when they do.
    """

    index: int
    count: int
    stands_in: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise BadArgument(repr(self), "index must lie in [0, count), and count be positive")


ALONE = DataShard(0, 1)


class SampleRange(NamedTuple):
    """Positions ``start`` up to, not including, ``stop``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of positions."""
        return self.stop - self.start


def mix(*keys: int) -> int:
    """Hash several integers into a 63-bit seed; neighbouring keys give unrelated seeds.

    >>> mix(0, 1) == mix(0, 1), mix(0, 1) == mix(1, 0)
    (True, False)
    """
    digest = hashlib.blake2b(repr(keys).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def order(length: int, *, seed: int, epoch: int, shuffle: bool = True) -> Tensor | range:
    """Return the samples of one epoch in their global order.

    >>> order(4, seed=0, epoch=0, shuffle=False)
    range(0, 4)
    """
    if not shuffle:
        return range(length)
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(length, generator=generator)  # (length,)


def part(span: SampleRange, share: DataShard) -> SampleRange:
    """Return a worker's contiguous part of a range; sizes differ by one, the first are larger.

    >>> [tuple(part(SampleRange(10, 15), DataShard(i, 3))) for i in range(3)]
    [(10, 12), (12, 14), (14, 15)]
    """
    each, rest = divmod(span.size, share.count)
    start = span.start + share.index * each + min(share.index, rest)
    return SampleRange(start, start + each + (share.index < rest))


def batches(
    span: SampleRange, batch_size: int, *, drop_last: bool = False
) -> Iterator[SampleRange]:
    """Yield the ranges of global batches; the last may be smaller unless it is dropped.

    >>> [tuple(batch) for batch in batches(SampleRange(2, 7), 3)]
    [(2, 5), (5, 7)]
    """
    for start in range(span.start, span.stop, batch_size):
        stop = min(start + batch_size, span.stop)
        if drop_last and stop - start < batch_size:
            return
        yield SampleRange(start, stop)


def batch_count(length: int, batch_size: int, *, drop_last: bool = False) -> int:
    """Return the number of global batches in one epoch.

    >>> batch_count(7, 3), batch_count(7, 3, drop_last=True)
    (3, 2)
    """
    return length // batch_size if drop_last else -(-length // batch_size)
