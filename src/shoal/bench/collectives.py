"""Suite ``collectives``: the shoal backend against gloo, and against a copy of the message.

For each number of ranks one set of workers holds both groups, and the contenders take turns block
by block, so that what disturbs the machine falls on all. A block's time is the slowest rank's. The
copy is one ``memmove`` of the message by one thread, while the other ranks sleep.

Bars: an all_reduce at 64 KB and above takes at most a third of gloo's time, of a shared bucket at
most a fifth; of a bucket of 64 MB at most 2.5 (2 ranks) or 3.5 (4 ranks) times a copy; nothing is
slower than gloo. A step of DDP takes at most 0.75 of gloo's on a large model, never more than 1.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from ctypes import memmove
from dataclasses import dataclass, replace
from statistics import median

from shoal.bench.blocks import slowest
from shoal.bench.collective_calls import ALL_REDUCE, COLLECTIVES, IN_PLACE, Call, Collective
from shoal.bench.form import Bar, Result
from shoal.bench.statistics import Estimate, estimate, paired_ratios
from shoal.bench.suites import Settings, Suite
from shoal.errors import BadArgument
from shoal.testing.processes import run_workers

KB, MB = 1 << 10, 1 << 20
SIZES = tuple(4 * KB * 4**i for i in range(8))  # 4 KB .. 64 MB
RANKS = (2, 4)
_BARRED = (64 * KB, MB, 16 * MB, 64 * MB)
_COPIES = {2: "<= 2.5", 4: "<= 3.5"}  # of a bucket of 64 MB
_BLOCKS, _QUICK_BLOCKS = 16, 12
_UNITS = {"B": 1, "KB": KB, "MB": MB, "GB": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([KMG]?B)", re.IGNORECASE)


@dataclass(frozen=True)
class Point:
    """What one set of timings is of.

    Attributes:
        name: of the collective.
        nbytes: of the message.
        ranks: how many take part.
    """

    name: str
    nbytes: int
    ranks: int

    @property
    def case(self) -> str:
        """For the report."""
        return f"{spell(self.nbytes)}, {self.ranks} ranks"


@dataclass(frozen=True)
class Times:
    """Seconds of a call, block by block."""

    shoal: Sequence[float]
    gloo: Sequence[float]
    copy: Sequence[float]


def spell(nbytes: int) -> str:
    """A size as one says it."""
    for unit in ("GB", "MB", "KB"):
        if nbytes >= _UNITS[unit] and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]} {unit}"
    return f"{nbytes} B"


def parse_sizes(text: str) -> tuple[int, ...]:
    """The sizes that ``4KB:64MB`` means, in steps of four; one alone means itself.

    >>> parse_sizes("4KB:64KB")
    (4096, 16384, 65536)
    """
    ends = [_SIZE.fullmatch(part.strip()) for part in text.split(":")]
    if len(ends) not in (1, 2) or any(end is None for end in ends):
        raise BadArgument(f"--sizes {text}", "sizes are written 4KB:64MB, or 1MB for one alone")
    first, *rest = (int(end[1]) * _UNITS[end[2].upper()] for end in ends if end)
    last = rest[0] if rest else first
    if not 64 <= first <= last:
        raise BadArgument(f"--sizes {text}", "the first is the smaller one, and at least 64B")
    sizes = [first]
    while sizes[-1] * 4 <= last:
        sizes.append(sizes[-1] * 4)
    return tuple(sizes)


def run(
    settings: Settings, ranks: Sequence[int] | None = None, sizes: Sequence[int] | None = None
) -> Iterator[Result]:
    """Every measurement of the suite.

    Args:
        settings: of the run.
        ranks: how many take part; 2, then 4.
        sizes: of messages in bytes; 4 KB to 64 MB.
    """
    blocks = _QUICK_BLOCKS if settings.quick else _BLOCKS
    chosen = sizes or (SIZES[::2][:3] if settings.quick else SIZES)
    counts = ranks or (RANKS[:1] if settings.quick else RANKS)
    plan = [(count, nbytes) for count in counts for nbytes in chosen]
    measured = []
    for done, (count, nbytes) in enumerate(plan):
        settings.progress(f"{count} ranks, {spell(nbytes)}", done, len(plan))
        measured += measure(count, nbytes, blocks)
    for collective in COLLECTIVES:  # a table each, of all sizes
        mine = [item for item in measured if item[0].name == collective.name]
        yield from (timed(*item) for item in mine)
        yield from (spaced(*item) for item in mine)
    if not settings.quick:
        from shoal.bench.ddp_steps import steps

        yield from steps(settings)


SUITE = Suite("collectives", "the shoal backend against gloo and a copy of the message", run)


def timed(point: Point, times: Times) -> Result:
    """The time of a call, against gloo's."""
    ratio = estimate(paired_ratios(times.shoal, times.gloo))
    row = Result(
        point.case, f"{point.name}: time", 1e6 * median(times.shoal), "us", "gloo", ratio.value
    )
    return _barred(row, ratio, gloo_bar(point))


def spaced(point: Point, times: Times) -> Result:
    """The bus bandwidth of a call; its time, against that of a copy."""
    traffic = next(c.traffic for c in COLLECTIVES if c.name == point.name)(point.ranks)
    bandwidth = traffic * point.nbytes / median(times.shoal) / 1e9
    ratio = estimate(paired_ratios(times.shoal, times.copy))
    row = Result(
        point.case, f"{point.name}: bus bandwidth", bandwidth, "GB/s", "a copy", ratio.value
    )
    return _barred(row, ratio, copy_bar(point))


def _barred(row: Result, ratio: Estimate, bar: str | None) -> Result:
    holds = None if bar is None else Bar.parse(bar).met(ratio.value)
    return replace(row, interval=ratio.interval, bar=bar, holds=holds)


def gloo_bar(point: Point) -> str:
    """Of the time, as a part of gloo's."""
    if point.nbytes in _BARRED and point.name == ALL_REDUCE.name:
        return "<= 0.3333"
    if point.nbytes in _BARRED and point.name == IN_PLACE.name:
        return "<= 0.2"
    return "<= 1"


def copy_bar(point: Point) -> str | None:
    """Of the time, in copies of the message."""
    if point.name == IN_PLACE.name and point.nbytes == 64 * MB:
        return _COPIES.get(point.ranks)
    return None


def measure(ranks: int, nbytes: int, blocks: int) -> list[tuple[Point, Times]]:
    """Times of every collective for one size, in one set of workers."""
    workers = run_workers(ranks, time_blocks, nbytes, blocks, seconds=900)
    found = []
    for index, collective in enumerate(COLLECTIVES):
        each = [slowest([worker[index][kind] for worker in workers]) for kind in range(2)]
        point = Point(collective.name, nbytes, ranks)
        found.append((point, Times(each[0], each[1], workers[0][index][2])))
    return found


def time_blocks(nbytes: int, blocks: int) -> list[list[list[float]]]:
    """What a worker does: for each collective, seconds of shoal, of gloo and of a copy."""
    import torch.distributed as dist

    from shoal.wire.shm import register

    register()
    dist.init_process_group("shoal")
    world, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    if world is None:
        raise RuntimeError("no process group was made")
    times = max(1, min(50, MB // nbytes * 2))
    found = []
    for collective in COLLECTIVES:
        calls = [_prepared(collective, group, nbytes // 4) for group in (world, gloo)]
        found.append(_in_turns(calls, times, blocks, _copier(nbytes)))
    return found


def _prepared(collective: Collective, group: object, numel: int) -> Call:
    call = collective.prepare(group, numel)  # type: ignore[arg-type]
    for _ in range(2):
        call()
    return call


def _copier(nbytes: int) -> Call:
    import torch

    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    return lambda: memmove(target.data_ptr(), source.data_ptr(), nbytes)


def _in_turns(calls: Sequence[Call], times: int, blocks: int, copy: Call) -> list[list[float]]:
    """Seconds a call of each; AB in one block, BA in the next, and a copy by rank 0 after."""
    import torch.distributed as dist

    seconds: list[list[float]] = [[], [], []]
    for block in range(blocks):
        for which in (0, 1) if block % 2 == 0 else (1, 0):
            dist.barrier()
            seconds[which].append(_seconds(calls[which], times))
        dist.barrier()
        if dist.get_rank() == 0:
            seconds[2].append(_seconds(copy, times))
    return seconds


def _seconds(call: Call, times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begin) / times
