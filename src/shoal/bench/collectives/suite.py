"""Suite ``collectives``: the shoal backend against gloo, Open MPI and a copy of the message.

Module ``times`` measures; ``mpi_peer`` adds Open MPI if it is installed.

Thresholds:

* all_reduce of 64 KB, 1 MB, 16 MB and 64 MB takes at most a third of gloo's time; all_reduce of a
  shared bucket takes at most a fifth;
* all_reduce of a shared bucket of 64 MB takes at most as long as 2.5 copies of the message (2
  ranks) or 3.5 copies (4 ranks);
* no collective is slower than gloo's;
* all_reduce of 1 MB and more is not slower than MPI's (other collectives have no limit);
* a step of DDP takes at most 0.75 of its time on gloo for a large model, and at most 1 of it
  for a small model.

The A/A control of a collective times shoal twice. The half-width of its interval, multiplied by the
threshold, is added to the threshold. If the half-width is above ``MAX_HALF_WIDTH``, the result is
inconclusive unless the whole interval of the ratio lies on one side of the threshold. The control
of DDP times gloo twice, and the half-width is added without the multiplication.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from shoal.bench.collectives import mpi_peer
from shoal.bench.collectives.calls import ALL_REDUCE, COLLECTIVES, IN_PLACE
from shoal.bench.collectives.ddp_steps import steps
from shoal.bench.collectives.times import COPY, GLOO, MPI, SHOAL, TWIN, Times, time_blocks
from shoal.bench.plot import write_plot
from shoal.bench.report import Report, Result, Threshold
from shoal.bench.statistics import (
    MAX_HALF_WIDTH,
    MIN_BLOCKS,
    estimate,
    interval_verdict,
    paired_ratios,
    slowest,
)
from shoal.bench.suites import BenchSettings, Suite, machine
from shoal.errors import BadArgument
from shoal.testing.processes import run_workers

KB, MB = 1 << 10, 1 << 20
SIZES = tuple(4 * KB * 4**i for i in range(8))  # 4 KB .. 64 MB
RANKS = (2, 4)
MOST_RANKS = 64
_STRICT_SIZES = (64 * KB, MB, 16 * MB, 64 * MB)
_COPIES = {2: "<= 2.5", 4: "<= 3.5"}  # number of ranks -> threshold for a bucket of 64 MB
_BUFFERS = 10  # largest number of messages in a worker's memory, for all contenders together
_UNITS = {"B": 1, "KB": KB, "MB": MB, "GB": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([KMG]?B)", re.IGNORECASE)
_TIME, _BANDWIDTH = ": time", ": bus bandwidth"
_CASE = re.compile(r"(\d+) (B|KB|MB|GB), (\d+) ranks")  # does not match a control's case


@dataclass(frozen=True)
class CollectiveCase:
    """One collective, the bytes of its message, and the number of ranks."""

    name: str
    nbytes: int
    ranks: int

    def __str__(self) -> str:
        return f"{size_text(self.nbytes)}, {self.ranks} ranks"


Measured = tuple[CollectiveCase, Times]


def size_text(nbytes: int) -> str:
    """Return a size with its unit, as in ``4 KB``."""
    for unit in ("GB", "MB", "KB"):
        if nbytes >= _UNITS[unit] and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]} {unit}"
    return f"{nbytes} B"


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in bytes that a text such as ``4KB`` or ``4KB:64MB`` means.

    In a range, each size is four times the one before, up to the end of the range.

    >>> parse_sizes("4KB:64KB")
    (4096, 16384, 65536)
    """
    ends = [_SIZE.fullmatch(part.strip()) for part in text.split(":")]
    if len(ends) not in (1, 2) or any(end is None for end in ends):
        raise BadArgument(f"--sizes {text}", "write sizes as in 4KB:64MB, or one size as in 1MB")
    first, *rest = (int(end[1]) * _UNITS[end[2].upper()] for end in ends if end)
    last = rest[0] if rest else first
    if not 64 <= first <= last:
        raise BadArgument(f"--sizes {text}", "the first size must be >= 64B and <= the second")
    sizes = [first]
    while sizes[-1] * 4 <= last:
        sizes.append(sizes[-1] * 4)
    return tuple(sizes)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the numbers of ranks in ``2,4``.

    >>> parse_ranks("2, 4")
    (2, 4)
    """
    call, parts = f"--ranks {text}", [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise BadArgument(call, "write numbers of ranks as in 2,4, or one number as in 2")
    counts = tuple(int(part) for part in parts)
    if not all(2 <= count <= MOST_RANKS for count in counts):
        raise BadArgument(call, f"each number of ranks must lie in 2 .. {MOST_RANKS}")
    if len(set(counts)) < len(counts):
        raise BadArgument(call, "a number of ranks occurs twice; give each number once")
    return counts


def suite(ranks: Sequence[int] = (), sizes: Sequence[int] = ()) -> Suite:
    """Return the suite for these numbers of ranks and sizes in bytes.

    The defaults are 2 and 4 ranks, and 4 KB to 64 MB.

    Raises:
        BadArgument: the messages of all ranks do not fit this machine's memory.
    """
    largest, most = max(sizes, default=0), max(ranks, default=max(RANKS))
    memory = machine().memory_nbytes
    if memory and _BUFFERS * largest * most > memory:
        raise BadArgument(
            f"--sizes up to {size_text(largest)}",
            f"{most} ranks need {_BUFFERS * largest * most / 2**30:.0f} GB together, but this "
            f"machine has {memory / 2**30:.0f} GB; choose smaller messages or fewer ranks",
        )
    return replace(SUITE, run=partial(run, ranks=ranks, sizes=sizes))


def run(
    settings: BenchSettings, ranks: Sequence[int] = (), sizes: Sequence[int] = ()
) -> Iterator[Result]:
    """Yield every result. DDP is timed only if not quick and ``ranks`` and ``sizes`` are empty."""
    peer = mpi_peer.find_mpi().name
    chosen = sizes or (SIZES[::2][:3] if settings.quick else SIZES)
    counts = ranks or (RANKS[:1] if settings.quick else RANKS)
    plan = [(count, nbytes) for count in counts for nbytes in chosen]
    measured: list[Measured] = []
    for done, (count, nbytes) in enumerate(plan):
        settings.progress(f"{count} ranks, {size_text(nbytes)}", done, len(plan))
        blocks = MIN_BLOCKS if settings.quick or nbytes > MB else 2 * MIN_BLOCKS
        by_name = measure(count, nbytes, blocks, mpi=bool(peer))
        measured += [
            (CollectiveCase(name, nbytes, count), times) for name, times in by_name.items()
        ]
    for collective in COLLECTIVES:
        yield from rows([item for item in measured if item[0].name == collective.name], peer)
    if not (settings.quick or ranks or sizes):
        yield from steps(settings)


def measure(ranks: int, nbytes: int, blocks: int, *, mpi: bool = False) -> dict[str, Times]:
    """Return the times of every collective for one size, by name of the collective.

    The same workers time all of them. With ``mpi``, ``mpirun`` starts these, and times MPI, too.
    """
    if mpi:
        workers = mpi_peer.launch(ranks, nbytes, blocks)
    else:
        workers = run_workers(ranks, time_blocks, nbytes, blocks, seconds=1800)
    times: dict[str, Times] = {}
    for collective, each in zip(COLLECTIVES, zip(*workers, strict=True), strict=True):
        times[collective.name] = {who: slowest([one[who] for one in each]) for who in each[0]}
    return times


def rows(measured: Sequence[Measured], peer: str) -> Iterator[Result]:
    """Yield the results against gloo, against MPI and against a copy, then the controls."""
    yield from (time_row(*item, GLOO, "gloo") for item in measured)
    yield from (time_row(*item, MPI, peer) for item in measured if MPI in item[1])
    yield from (bandwidth_row(*item) for item in measured)
    yield from (control_row(*item) for item in measured)


def time_row(case: CollectiveCase, times: Times, who: str, peer: str) -> Result:
    """Return the result for the time of a call, compared with contender ``who``, named ``peer``."""
    threshold = gloo_threshold(case) if who == GLOO else mpi_threshold(case)
    ours = 1e6 * median(times[SHOAL])
    row = Result(str(case), f"{case.name}{_TIME}", ours, "us", peer, 1.0)
    return _with_verdict(row, times, who, threshold)


def bandwidth_row(case: CollectiveCase, times: Times) -> Result:
    """Return the result with the bus bandwidth of a call, and the ratio of its time to a copy's."""
    collective = next(each for each in COLLECTIVES if each.name == case.name)
    bandwidth = collective.traffic(case.ranks) * case.nbytes / median(times[SHOAL]) / 1e9
    row = Result(str(case), f"{case.name}{_BANDWIDTH}", bandwidth, "GB/s", "a copy", 1.0)
    return _with_verdict(row, times, COPY, copy_threshold(case))


def control_row(case: CollectiveCase, times: Times) -> Result:
    """Return the result of the A/A control: the twin of shoal compared with shoal."""
    seconds = 1e6 * median(times[TWIN])
    row = Result(f"{case}, A/A", f"{case.name}{_TIME}", seconds, "us", "itself", 1.0)
    ratio = estimate(paired_ratios(times[TWIN], times[SHOAL]))
    return replace(row, ratio=ratio.value, interval=ratio.interval)


def _with_verdict(row: Result, times: Times, who: str, threshold: str | None) -> Result:
    """Return the result with the ratio to contender ``who``, the threshold and the verdict."""
    ratio = estimate(paired_ratios(times[SHOAL], times[who]))
    noise = estimate(paired_ratios(times[TWIN], times[SHOAL])).interval.half_width
    passes = None
    if threshold is not None:
        limit = Threshold.parse(threshold)
        if noise <= MAX_HALF_WIDTH:
            passes = limit.met(ratio.value, slack=noise * limit.limit)  # noise is relative
        else:
            passes = interval_verdict(limit, ratio)
    return replace(
        row, ratio=ratio.value, interval=ratio.interval, threshold=threshold, passes=passes
    )


def gloo_threshold(case: CollectiveCase) -> str:
    """Return the threshold of the time divided by gloo's."""
    if case.nbytes in _STRICT_SIZES and case.name == ALL_REDUCE.name:
        return "<= 0.3333"
    if case.nbytes in _STRICT_SIZES and case.name == IN_PLACE.name:
        return "<= 0.2"
    return "<= 1"


def mpi_threshold(case: CollectiveCase) -> str | None:
    """Return the threshold of the time divided by MPI's, or None if there is none."""
    reduces = case.name in (ALL_REDUCE.name, IN_PLACE.name)
    return "<= 1" if reduces and case.nbytes >= MB else None


def copy_threshold(case: CollectiveCase) -> str | None:
    """Return the threshold of the time divided by that of a copy; None if there is none."""
    if case.name == IN_PLACE.name and case.nbytes == 64 * MB:
        return _COPIES.get(case.ranks)
    return None


Series = dict[str, list[tuple[float, float]]]


def draw(report: Report, folder: Path) -> Iterator[Path]:
    """Write a plot of time over size for each collective and number of ranks; yield the paths."""
    for (name, ranks), series in plot_series(report).items():
        path = folder / f"{re.sub('[^a-z_]+', '-', name)}-{ranks}-ranks.svg"
        write_plot(path, f"{name}, {ranks} ranks", "bytes of the message", "microseconds", series)
        yield path


def plot_series(report: Report) -> dict[tuple[str, str], Series]:
    """Return (bytes, microseconds) of shoal and of each peer, by collective and ranks."""
    plots: dict[tuple[str, str], Series] = {}
    ours: dict[tuple[str, str], float] = {}
    for row in report.results:
        case, name = _CASE.fullmatch(row.case), row.metric.partition(": ")[0]
        if case is None or row.ratio is None or row.against is None:
            continue
        nbytes, series = int(case[1]) * _UNITS[case[2]], plots.setdefault((name, case[3]), {})
        if row.metric.endswith(_TIME) and (name, row.case) not in ours:
            ours[name, row.case] = row.value
            series.setdefault("shoal", []).append((nbytes, row.value))
        if row.metric.endswith((_TIME, _BANDWIDTH)) and (name, row.case) in ours:
            peer_time = ours[name, row.case] / row.ratio
            series.setdefault(row.against, []).append((nbytes, peer_time))
    return plots


SUITE = Suite("collectives", "the shoal backend against gloo, Open MPI and a copy", run, draw)
