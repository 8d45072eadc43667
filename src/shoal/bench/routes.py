"""Suite ``routes``: each route of the collectives axis against torch's own all-reduce, over gloo.

For each number of ranks and size, the same workers run all routes that allow this number of ranks,
in turns, block by block. Blocks 2i and 2i + 1 have opposite orders. The time of a
block is that of the slowest rank. Separate results name the fastest route of each case, and the
routes that may be as fast within the noise; a plot shows the fastest ones. Eight ranks, which is
more than many machines have cores, are measured at a few sizes only.

Threshold: ``fastest``, which times routes and then chooses one, takes at most 1.1 times as long as
torch's own all-reduce. The A/A control times torch's own all-reduce twice; the half-width of its
interval is added to the threshold. If the half-width is above ``MAX_HALF_WIDTH``, the result is
inconclusive unless the whole interval of the ratio lies on one side of the threshold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from shoal.axes.collectives.kit.choose import WINNER, read_case
from shoal.bench.blocks import time_in_turns
from shoal.bench.plot import write_map, write_plot
from shoal.bench.report import Report, Result, Threshold
from shoal.bench.statistics import (
    MIN_BLOCKS,
    Estimate,
    estimate,
    lenient_verdict,
    paired_ratios,
    slowest,
)
from shoal.bench.suites import BenchSettings, Suite
from shoal.notation import nbytes_text
from shoal.testing.processes import run_workers

SIZES = tuple(4096 * 4**i for i in range(7))  # 4 KB .. 16 MB
RANKS = (2, 4)
MANY, MANY_SIZES = 8, (SIZES[0], SIZES[3], SIZES[5])
ROUTES = (
    "linear", "ring", "tree", "double_tree", "butterfly", "halving_doubling",
    "hierarchical(2, butterfly)", "blueconnect(2, 2)",
)  # fmt: skip
NATIVE, TWIN, FASTEST = "native", "native, again", "fastest"
THRESHOLD = "<= 1.1"
_CALLS = 8  # largest number of calls in a block
_QUICK = ((2, SIZES[0]), (2, SIZES[4]), (4, SIZES[4]))
_TIME = ": time"


@dataclass(frozen=True)
class RouteTimes:
    """Times of every route for one size and number of ranks."""

    ranks: int
    nbytes: int  # size of the message
    times: Mapping[str, Sequence[float]]  # route -> seconds of an all-reduce, block by block
    chosen: str  # the route that ``fastest`` chose

    @property
    def case(self) -> str:
        """The text of this case in a report, which ``read_case`` parses."""
        return f"{nbytes_text(self.nbytes)}, {self.ranks} ranks"


def run(settings: BenchSettings) -> Iterator[Result]:
    """Yield every result of the suite."""
    every = [(ranks, nbytes) for ranks in RANKS for nbytes in SIZES]
    every += [(MANY, nbytes) for nbytes in MANY_SIZES]
    plan, calls = (_QUICK, 1) if settings.quick else (every, _CALLS)
    points = []
    for done, (ranks, nbytes) in enumerate(plan):
        settings.progress(f"{ranks} ranks, {nbytes_text(nbytes)}", done, len(plan))
        points.append(measure(ranks, nbytes, MIN_BLOCKS, calls=calls))
    yield from rows(points)


def rows(points: Sequence[RouteTimes]) -> Iterator[Result]:
    """Yield the results: the fastest route of each case, then each route, then the controls."""
    yield from map(winner, points)
    for name in (FASTEST, *ROUTES):
        yield from (timed(point, name) for point in points if name in point.times)
    yield from (timed(point, NATIVE) for point in points)


def winner(point: RouteTimes) -> Result:
    """Return the result of the route with the least median time.

    Its case also names the routes that may be as fast: those whose ratio to the best one has
    an interval that begins at 1 or below. If torch's own all-reduce is the best, the ratio is that
    of the control. ``fastest`` does not take part, because it is not a route of its own.
    """
    routes = [name for name in point.times if name not in (TWIN, FASTEST)]
    best, *others = sorted(routes, key=lambda name: median(point.times[name]))
    as_fast = [name for name in others if _ratio(point, name, best).interval.low <= 1]
    case = f"{point.case}: {' or '.join([best, *as_fast])}"
    return replace(timed(point, best), case=case, metric=WINNER, against=NATIVE)


def _ratio(point: RouteTimes, name: str, peer: str) -> Estimate:
    return estimate(paired_ratios(point.times[name], point.times[peer]))


def timed(point: RouteTimes, name: str) -> Result:
    """Return the result of one route against torch's own, or of torch's own against its twin."""
    peer = TWIN if name == NATIVE else NATIVE
    ratio, value = _ratio(point, name, peer), 1e3 * median(point.times[name])
    row = Result(point.case, f"{name}{_TIME}", value, "ms", peer, ratio.value, ratio.interval)
    if name != FASTEST:
        return row
    passes = lenient_verdict(Threshold.parse(THRESHOLD), ratio, _ratio(point, TWIN, NATIVE))
    case = f"{point.case}: {point.chosen}"
    return replace(row, case=case, threshold=THRESHOLD, passes=passes)


Series = dict[str, list[tuple[float, float]]]


def draw(report: Report, folder: Path) -> list[Path]:
    """Write plots of the times and of the fastest routes into ``folder``; return their paths."""
    by_ranks, by_size = dict[int, Series](), dict[int, Series]()
    for row in report.results:
        name, mark, _ = row.metric.partition(_TIME)
        if mark:
            size, ranks, _ = read_case(row.case)
            by_ranks.setdefault(ranks, {}).setdefault(name, []).append((size, row.value))
            by_size.setdefault(size, {}).setdefault(name, []).append((ranks, row.value))
    written = []
    for ranks, series in sorted(by_ranks.items()):
        written.append(folder / f"routes-{ranks}-ranks.svg")
        title = f"all-reduce over gloo, {ranks} ranks"
        write_plot(written[-1], title, "bytes of the message", "milliseconds", series)
    for size in [size for size in sorted(by_size) if size in MANY_SIZES]:
        written.append(folder / f"routes-{nbytes_text(size)}.svg")
        title = f"all-reduce over gloo, {nbytes_text(size)}"
        write_plot(written[-1], title, "ranks", "milliseconds", by_size[size])
    written.append(folder / "routes-winners.svg")
    _draw_winners(report, written[-1])
    return written


def _draw_winners(report: Report, path: Path) -> None:
    rows: dict[str, dict[str, str]] = {}
    for row in report.results:
        if row.metric == WINNER:
            case, _, names = row.case.partition(": ")
            size, ranks = case.split(", ")
            first, *others = names.split(" or ")
            also = f"\nor {len(others)} more" if others else ""
            rows.setdefault(ranks, {})[size] = first + also
    sizes = [nbytes_text(nbytes) for nbytes in SIZES]
    write_map(path, "the fastest route of an all-reduce over gloo", sizes, rows)


SUITE = Suite("routes", "each route against torch's own all-reduce, by size and ranks", run, draw)


def measure(ranks: int, nbytes: int, blocks: int, *, calls: int = _CALLS) -> RouteTimes:
    """Return the times of every route in ``blocks`` blocks of at most ``calls`` all-reduces."""
    from shoal.wire.probe import in_a_row

    repeats = in_a_row(nbytes, calls)
    workers = run_workers(ranks, time_blocks, nbytes, blocks, repeats, seconds=1800)
    names = list(workers[0][0])
    seconds = {name: slowest([worker[0][name] for worker in workers]) for name in names}
    return RouteTimes(ranks, nbytes, seconds, chosen=workers[0][1])


def time_blocks(nbytes: int, blocks: int, repeats: int) -> tuple[dict[str, list[float]], str]:
    """Return the seconds of each route in each block of this worker, and the choice of fastest."""
    import torch
    import torch.distributed as dist

    from shoal.runtime.context import ReplicaIndex
    from shoal.runtime.wires import RouteTuner, routed
    from shoal.testing.contracts import make

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    index = ReplicaIndex(dist.get_rank(), dist.get_world_size())
    known = {name: make(name) for name in (NATIVE, *ROUTES, FASTEST)}
    served = {name: route for name, route in known.items() if not route.refusal(index.workers)}
    reduce = {name: routed(route, index, None) or dist.all_reduce for name, route in served.items()}
    reduce[TWIN] = reduce[NATIVE]
    message = torch.zeros(nbytes // 4)  # a sum of zeros is zero, so repeated calls do not overflow
    calls = {name: partial(each, message) for name, each in reduce.items()}
    seconds = time_in_turns(calls, repeats, blocks)
    chooser = reduce[FASTEST]
    chosen = repr(chooser.chosen[nbytes]) if isinstance(chooser, RouteTuner) else ""
    return seconds, chosen
