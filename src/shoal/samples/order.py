"""Compute the order of the samples in an epoch, and which worker reads which of them.

The order of an epoch depends on the seed, the epoch and the length of the dataset, never on the
number of workers. Position p of that order is sample ``order(...)[p]``. A global batch is a range
of positions, and a worker's part is a contiguous range within that batch. So any number of
workers together read the same global batches.
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

    ``stands_in`` is True for a rank that holds a part of the model, so that it must run forward and
    backward when the others do. If its part of a batch is empty, one sample is used instead,
    to which the step gives weight zero.
    """

    index: int
    count: int
    stands_in: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise BadArgument(repr(self), "index must lie in [0, count)")


ALONE = DataShard(0, 1)


class SampleRange(NamedTuple):
    """The positions from ``start`` up to, but not including, ``stop``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of positions."""
        return self.stop - self.start


def mix(*keys: int) -> int:
    """Return a 63-bit seed that is a hash of the keys; similar keys give unrelated seeds.

    >>> mix(0, 1) == mix(0, 1), mix(0, 1) == mix(1, 0)
    (True, False)
    """
    digest = hashlib.blake2b(repr(keys).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def order(length: int, *, seed: int, epoch: int, shuffle: bool = True) -> Tensor | range:
    """Return the indices of all samples of a dataset, in the global order of one epoch.

    >>> order(4, seed=0, epoch=0, shuffle=False)
    range(0, 4)
    """
    if not shuffle:
        return range(length)
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(length, generator=generator)  # (length,)


def part(span: SampleRange, share: DataShard) -> SampleRange:
    """Return a worker's contiguous part of a range; a remainder goes to the first workers.

    >>> [tuple(part(SampleRange(10, 15), DataShard(i, 3))) for i in range(3)]
    [(10, 12), (12, 14), (14, 15)]
    """
    each, rest = divmod(span.size, share.count)
    start = span.start + share.index * each + min(share.index, rest)
    return SampleRange(start, start + each + (share.index < rest))


def batches(
    span: SampleRange, batch_size: int, *, drop_last: bool = False
) -> Iterator[SampleRange]:
    """Yield the range of each global batch; ``drop_last`` leaves out a last batch that is not full.

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
