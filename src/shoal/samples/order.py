"""Which sample stands where, and whose it is: pure functions, no dataset, no torch DataLoader.

The order of an epoch depends on (seed, epoch) alone, never on the number of workers. Position p of
that order is sample ``order(...)[p]``. A global batch is a range of positions; a worker's part is a
contiguous range within it. So any number of workers, started at any position, reads the same tail.
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
    """This worker among the data-parallel workers: ``index`` of ``count``.

    With ``stands_in`` an empty part comes as one sample that weighs nothing: this rank holds a part
    of others' model, and must compute when they do.
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
        """How many positions."""
        return self.stop - self.start


def mix(*keys: int) -> int:
    """One 63-bit seed out of several integers; neighbouring keys give unrelated seeds.

    >>> mix(0, 1) == mix(0, 1), mix(0, 1) == mix(1, 0)
    (True, False)
    """
    digest = hashlib.blake2b(repr(keys).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def order(length: int, *, seed: int, epoch: int, shuffle: bool = True) -> Tensor | range:
    """The samples of one epoch in their global order.

    >>> order(4, seed=0, epoch=0, shuffle=False)
    range(0, 4)
    """
    if not shuffle:
        return range(length)
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(length, generator=generator)  # (length,)


def part(span: SampleRange, share: DataShard) -> SampleRange:
    """A worker's contiguous part of a range; sizes differ by at most one, the first are larger.

    >>> [part(Span(10, 15), Share(i, 3)) for i in range(3)]
    [Span(start=10, stop=12), Span(start=12, stop=14), Span(start=14, stop=15)]
    """
    each, rest = divmod(span.size, share.count)
    start = span.start + share.index * each + min(share.index, rest)
    return SampleRange(start, start + each + (share.index < rest))


def batches(
    span: SampleRange, batch_size: int, *, drop_last: bool = False
) -> Iterator[SampleRange]:
    """Global batches from ``span.start`` on; the last may be smaller unless it is dropped.

    >>> list(batches(Span(2, 7), 3))
    [Span(start=2, stop=5), Span(start=5, stop=7)]
    """
    for start in range(span.start, span.stop, batch_size):
        stop = min(start + batch_size, span.stop)
        if drop_last and stop - start < batch_size:
            return
        yield SampleRange(start, stop)


def batch_count(length: int, batch_size: int, *, drop_last: bool = False) -> int:
    """Global batches in one epoch.

    >>> batch_count(7, 3), batch_count(7, 3, drop_last=True)
    (3, 2)
    """
    return length // batch_size if drop_last else -(-length // batch_size)
