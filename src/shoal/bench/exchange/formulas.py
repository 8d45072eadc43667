"""Bytes that a rank sends in a step by each technique's formula, against what its device counted.

An all-reduce by rings sends ``2 (n - 1) / n`` of the message, an all-gather ``n - 1`` times one's
own. Headers are in the count and not in the formula: with packets of 16 KB they are under 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from shoal.bench.exchange.contenders import DDP, EXACT, OUR_POWERSGD, RANK
from shoal.bench.exchange.judge import Run
from shoal.bench.form import Bar, Result

Shapes = Sequence[tuple[int, ...]]
Formula = Callable[[Shapes, int], float]
BAR = "<= 0.05"


def entries(shapes: Shapes) -> int:
    """Of all parameters together."""
    return sum(math.prod(shape) for shape in shapes)


def dense(nbytes: float) -> Formula:
    """Every entry, in so many bytes, summed on the way."""
    return lambda shapes, n: 2 * (n - 1) / n * nbytes * entries(shapes)


def low_rank(shapes: Shapes, n: int) -> float:
    """``rank * (rows + columns)`` numbers of a matrix; what would not shrink goes as it is."""
    numbers = 0
    for shape in shapes:
        rows, columns = shape[0], math.prod(shape[1:])
        thin = RANK * (rows + columns) if len(shape) > 1 else math.inf
        numbers += int(min(thin, math.prod(shape)))
    return 2 * (n - 1) / n * 4 * numbers


def sparse(ratio: float) -> Formula:
    """Four bytes a value and as few a place as there are, each to everybody else."""

    def formula(shapes: Shapes, n: int) -> float:
        return (n - 1) * sum(_entries_nbytes(ratio, math.prod(shape)) for shape in shapes)

    return formula


def _entries_nbytes(ratio: float, numel: int) -> float:
    count = max(1, int(ratio * numel))
    places = ((256**width - 1, width) for width in (1, 2))  # blocks whose count fits the width
    short = (width * (count + math.ceil(numel / block)) for block, width in places)
    return 4 * count + min(4 * count, *short)


def every(steps: int, formula: Formula) -> Formula:
    """Once in so many steps."""
    return lambda shapes, n: formula(shapes, n) / steps


FORMULAS: Mapping[str, Formula] = {
    DDP: dense(4),
    EXACT: dense(4),
    "all_reduce, bsp, wfbp, cast(bfloat16)": dense(2),
    OUR_POWERSGD: low_rank,
    "all_reduce, bsp, wfbp, error_feedback(topk(0.01))": sparse(0.01),
    "all_reduce, local(8), fifo, exact": every(8, dense(4)),
    "all_reduce, local(16), fifo, exact": every(16, dense(4)),
}


def counted(case: str, runs: Iterable[Run], shapes: Shapes, workers: int) -> Iterable[Result]:
    """A row for each technique with a formula: how far what was sent lies from it."""
    known = [run for run in runs if run.contender in FORMULAS and run.nbytes > 0]
    ratios = [run.nbytes / FORMULAS[run.contender](shapes, workers) for run in known]
    for run, ratio in zip(known, ratios, strict=True):
        name, sent = f"{case}: {run.contender}", run.nbytes / 1e6
        yield Result(name, "bytes sent a step", sent, "MB", "formula", ratio)
    for run, ratio in zip(known, ratios, strict=True):
        name, off = f"{case}: {run.contender}", abs(ratio - 1)
        met = Bar.parse(BAR).met(off)
        yield Result(name, "bytes off the formula", off, "", bar=BAR, holds=met)
