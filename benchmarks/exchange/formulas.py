"""Bytes that a rank sends in a step by each technique's formula, against what was counted.

An all-reduce by rings sends ``2 (n - 1) / n`` of the message, an all-gather ``n - 1`` times one's
own. The bar is for what is counted at the sockets; what the device counted is told beside it: the
headers of TCP and IP are in it, and acknowledgements, which weigh where messages are short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from shoal.bench.exchange.contenders import (
    CARRIED_ON,
    DDP,
    EXACT,
    OFTENER,
    OUR_POWERSGD,
    RANK,
    SELDOM,
    TOPK,
)
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


def low_rank(kept: int) -> Formula:
    """``kept * (rows + columns)`` numbers of a matrix; what would not shrink goes as it is."""

    def formula(shapes: Shapes, n: int) -> float:
        numbers = 0
        for shape in shapes:
            rows, columns = shape[0], math.prod(shape[1:])
            thin = kept * (rows + columns) if len(shape) > 1 else math.inf
            numbers += int(min(thin, math.prod(shape)))
        return 2 * (n - 1) / n * 4 * numbers

    return formula


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


def coded(bits: float, scales: Callable[[tuple[int, ...]], float]) -> Formula:
    """So many bits an entry, and so many bytes a tensor, each to everybody else."""

    def formula(shapes: Shapes, n: int) -> float:
        return (n - 1) * sum(bits / 8 * math.prod(shape) + scales(shape) for shape in shapes)

    return formula


def a_block(entries: int) -> Callable[[tuple[int, ...]], float]:
    """One scale for so many entries."""
    return lambda shape: 4 * math.ceil(math.prod(shape) / entries)


def a_column(shape: tuple[int, ...]) -> float:
    """Two means for each row of a matrix whose rows are long; else for the tensor."""
    rows = len(shape) > 1 and math.prod(shape[1:]) >= LONG_ROW
    return 8 * (shape[0] if rows else 1)


def few(ratio: float) -> Formula:
    """The same entries of all, so that they are summed and their places are known."""
    return lambda shapes, n: sum(
        2 * (n - 1) / n * 4 * max(1, int(ratio * math.prod(shape))) for shape in shapes
    )


def merged_up(ratio: float) -> Formula:
    """As long as one worker's message, up a tree and down again: 2 (n - 1) messages by n ranks."""
    return lambda shapes, n: sparse(ratio)(shapes, n) * 2 / n


def factors(batch: int) -> Formula:
    """``batch * (rows + columns)`` numbers of a matrix, to everybody else; the rest is summed."""

    def formula(shapes: Shapes, n: int) -> float:
        thin = [s for s in shapes if len(s) == 2 and batch * sum(s) < math.prod(s)]
        rest = [s for s in shapes if s not in thin]
        return (n - 1) * 4 * batch * sum(map(sum, thin)) + dense(4)(rest, n)

    return formula


def every(steps: int, formula: Formula) -> Formula:
    """Once in so many steps."""
    return lambda shapes, n: formula(shapes, n) / steps


BATCH, LONG_ROW = 32, 64  # of the workload "mlp"; of onebit's columns
FORMULAS: Mapping[str, Formula] = {
    DDP: dense(4),
    EXACT: dense(4),
    OUR_POWERSGD: low_rank(RANK),
    TOPK: sparse(0.01),
    "all_reduce, local(8), fifo, exact": every(8, dense(4)),
    SELDOM: every(28, low_rank(32)),
    OFTENER: every(10, low_rank(16)),
    CARRIED_ON: every(9, low_rank(RANK)),
    **{
        f"all_reduce, bsp, wfbp, {compressor}": formula
        for compressor, formula in {
            "cast(bfloat16)": dense(2),
            "qsgd(16)": coded(6, a_block(512)),
            "terngrad": coded(2, lambda _: 4),
            "onebit": coded(1, a_column),
            "twobit(0.01)": coded(2, lambda _: 4),
            "sign": coded(1, lambda _: 4),
            "natural": coded(9, lambda _: 0),
            "int8": coded(8, a_block(256)),
            "topk(0.01)": sparse(0.01),
            "random_k(0.01)": few(0.01),
            "gtopk(0.01)": merged_up(0.01),
            "sufficient_factors": factors(BATCH),
        }.items()
    },
}


class Sent(NamedTuple):
    """Bytes a step that a worker of one contender sent: at its sockets, and at its device."""

    contender: str
    nbytes: float
    device_nbytes: float


def counted(case: str, sent: Iterable[Sent], shapes: Shapes, workers: int) -> Iterable[Result]:
    """Rows for each technique with a formula: how far what was sent lies from it."""
    known = [
        (f"{case}: {each.contender}", each, FORMULAS[each.contender](shapes, workers))
        for each in sent
        if each.contender in FORMULAS and each.nbytes > 0
    ]
    for name, each, nbytes in known:
        ratio = each.nbytes / nbytes
        yield Result(name, "bytes sent a step", each.nbytes / 1e6, "MB", "formula", ratio)
    for name, each, nbytes in known:
        told, ratio = each.device_nbytes / 1e6, each.device_nbytes / nbytes
        yield Result(name, "bytes of the device, headers too", told, "MB", "formula", ratio)
    for name, each, nbytes in known:
        off = abs(each.nbytes / nbytes - 1)
        met = Bar.parse(BAR).met(off)
        yield Result(name, "bytes off the formula", off, "", bar=BAR, holds=met)
