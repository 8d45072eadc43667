"""Suite ``collectives``: the shoal backend against gloo, Open MPI and a copy of the message.

How they are timed is in ``collective_times``, how MPI joins in, where it is, in ``mpi_peer``.

Bars, of the ratio of times: an all_reduce at 64 KB and above takes at most a third of gloo's time,
of a shared bucket at most a fifth; of a bucket of 64 MB at most 2.5 (2 ranks) or 3.5 (4 ranks)
copies; nothing is slower than gloo; at 1 MB and above no all_reduce is slower than MPI's (the other
collectives are told next to MPI's). A step of DDP takes at most 0.75 of gloo's on a large model,
never more than 1. A twin, shoal against itself, is the A/A control of every point: its half-width
widens the bar by as large a part; over ``MAX_HALF_WIDTH`` there is a verdict only where the whole
interval of the ratio lies on one side of the bar.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from shoal.bench.collective_calls import ALL_REDUCE, COLLECTIVES, IN_PLACE, Collective
from shoal.bench.collective_plots import draw
from shoal.bench.collective_times import COPY, GLOO, MPI, SHOAL, TWIN, Times, measure
from shoal.bench.form import Bar, Result
from shoal.bench.statistics import (
    MAX_HALF_WIDTH,
    MIN_BLOCKS,
    estimate,
    paired_ratios,
    settled,
)
from shoal.bench.suites import Settings, Suite, machine
from shoal.errors import BadArgument

KB, MB = 1 << 10, 1 << 20
SIZES = tuple(4 * KB * 4**i for i in range(8))  # 4 KB .. 64 MB
RANKS = (2, 4)
MOST_RANKS = 64
_BARRED = (64 * KB, MB, 16 * MB, 64 * MB)
_COPIES = {2: "<= 2.5", 4: "<= 3.5"}  # of a bucket of 64 MB
_HELD = 10  # messages that a worker holds at most, all contenders' together
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


Measured = tuple[Point, Times]


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


def parse_ranks(text: str) -> tuple[int, ...]:
    """The numbers of ranks that ``2,4`` means.

    >>> parse_ranks("2, 4")
    (2, 4)
    """
    call, parts = f"--ranks {text}", [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise BadArgument(call, "numbers of ranks are written 2,4, or 2 for one alone")
    counts = tuple(int(part) for part in parts)
    if not all(2 <= count <= MOST_RANKS for count in counts):
        raise BadArgument(call, f"each must lie in 2 .. {MOST_RANKS}")
    if len(set(counts)) < len(counts):
        raise BadArgument(call, "name each number once")
    return counts


def suite(ranks: Sequence[int] = (), sizes: Sequence[int] = ()) -> Suite:
    """The suite for these ranks and sizes; its usual ones where none are given.

    Args:
        ranks: how many take part; 2, then 4.
        sizes: of messages in bytes; 4 KB to 64 MB.

    Raises:
        BadArgument: the largest message does not fit this machine's memory as often as needed.
    """
    largest, most = max(sizes, default=0), max(ranks, default=max(RANKS))
    memory = machine().memory_nbytes
    if memory and _HELD * largest * most > memory:
        raise BadArgument(
            f"--sizes up to {spell(largest)}",
            f"{most} ranks would hold {_HELD * largest * most / 2**30:.0f} GB together, and this "
            f"machine has {memory / 2**30:.0f}; ask for smaller messages or fewer ranks",
        )
    return replace(SUITE, run=partial(run, ranks=ranks, sizes=sizes))


def run(
    settings: Settings, ranks: Sequence[int] = (), sizes: Sequence[int] = ()
) -> Iterator[Result]:
    """Every measurement of the suite; DDP's steps too, unless ranks or sizes are chosen."""
    from shoal.bench import mpi_peer

    peer = mpi_peer.find().name
    chosen = sizes or (SIZES[::2][:3] if settings.quick else SIZES)
    counts = ranks or (RANKS[:1] if settings.quick else RANKS)
    plan = [(count, nbytes) for count in counts for nbytes in chosen]
    measured: list[Measured] = []
    for done, (count, nbytes) in enumerate(plan):
        settings.progress(f"{count} ranks, {spell(nbytes)}", done, len(plan))
        blocks = MIN_BLOCKS if settings.quick or nbytes > MB else 2 * MIN_BLOCKS
        found = measure(count, nbytes, blocks, mpi=bool(peer))
        measured += [(Point(name, nbytes, count), times) for name, times in found.items()]
    for collective in COLLECTIVES:
        yield from rows([item for item in measured if item[0].name == collective.name], peer)
    if not (settings.quick or ranks or sizes):
        from shoal.bench.ddp_steps import steps

        yield from steps(settings)


SUITE = Suite("collectives", "the shoal backend against gloo, Open MPI and a copy", run, draw)


def rows(measured: Sequence[Measured], peer: str) -> Iterator[Result]:
    """A table against each peer, of all sizes; then the control."""
    yield from (timed(*item, GLOO, "gloo") for item in measured)
    yield from (timed(*item, MPI, peer) for item in measured if MPI in item[1])
    yield from (spaced(*item) for item in measured)
    yield from (control(*item) for item in measured)


def timed(point: Point, times: Times, who: str, peer: str) -> Result:
    """The time of a call, against a peer's."""
    bar = gloo_bar(point) if who == GLOO else mpi_bar(point)
    ours = 1e6 * median(times[SHOAL])
    row = Result(point.case, f"{point.name}: time", ours, "us", peer, 1.0)
    return _held(row, times, who, bar)


def spaced(point: Point, times: Times) -> Result:
    """The bus bandwidth of a call; its time, against that of a copy."""
    bandwidth = _collective(point).traffic(point.ranks) * point.nbytes / median(times[SHOAL]) / 1e9
    row = Result(point.case, f"{point.name}: bus bandwidth", bandwidth, "GB/s", "a copy", 1.0)
    return _held(row, times, COPY, copy_bar(point))


def control(point: Point, times: Times) -> Result:
    """A/A: how far apart equals seem to be."""
    seconds = 1e6 * median(times[TWIN])
    row = Result(f"{point.case}, A/A", f"{point.name}: time", seconds, "us", "itself", 1.0)
    found = estimate(paired_ratios(times[TWIN], times[SHOAL]))
    return replace(row, ratio=found.value, interval=found.interval)


def _collective(point: Point) -> Collective:
    return next(each for each in COLLECTIVES if each.name == point.name)


def _held(row: Result, times: Times, who: str, bar: str | None) -> Result:
    """The row with its ratio, and the verdict on it."""
    ratio = estimate(paired_ratios(times[SHOAL], times[who]))
    noise = estimate(paired_ratios(times[TWIN], times[SHOAL])).interval.half_width
    holds = None
    if bar is not None:
        target = Bar.parse(bar)
        kept = target.met(ratio.value, slack=noise * target.limit)  # noise is a part of the time
        holds = kept if noise <= MAX_HALF_WIDTH else settled(target, ratio)
    return replace(row, ratio=ratio.value, interval=ratio.interval, bar=bar, holds=holds)


def gloo_bar(point: Point) -> str:
    """Of the time, as a part of gloo's."""
    if point.nbytes in _BARRED and point.name == ALL_REDUCE.name:
        return "<= 0.3333"
    if point.nbytes in _BARRED and point.name == IN_PLACE.name:
        return "<= 0.2"
    return "<= 1"


def mpi_bar(point: Point) -> str | None:
    """Of the time, as a part of MPI's."""
    reduces = point.name in (ALL_REDUCE.name, IN_PLACE.name)
    return "<= 1" if reduces and point.nbytes >= MB else None


def copy_bar(point: Point) -> str | None:
    """Of the time, in copies of the message."""
    if point.name == IN_PLACE.name and point.nbytes == 64 * MB:
        return _COPIES.get(point.ranks)
    return None
