"""Bytes that a rank sends in a step by each technique's formula, against the bytes counted.

A ring all-reduce sends ``2 (n - 1) / n`` of the message, an all-gather ``n - 1`` times a rank's own
part. The threshold is for the bytes counted at the sockets. Those counted at the network device are
reported too: they contain the headers of TCP and IP, and acknowledgements, which matter where
messages are short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.exchange.contenders import (
    CARRIED_ON,
    DDP,
    EXACT,
    OFTENER,
    OUR_POWERSGD,
    RANK,
    SELDOM,
    TOPK,
)
from shoal.bench.report import Result, Threshold

Shapes = Sequence[tuple[int, ...]]
Formula = Callable[[Shapes, int], float]
THRESHOLD = "<= 0.05"


def entries(shapes: Shapes) -> int:
    """Return the number of entries of all parameters."""
    return sum(math.prod(shape) for shape in shapes)


def dense(nbytes: float) -> Formula:
    """Every entry in ``nbytes`` bytes, all-reduced."""
    return lambda shapes, n: 2 * (n - 1) / n * nbytes * entries(shapes)


def low_rank(rank: int) -> Formula:
    """``rank * (rows + columns)`` numbers of a matrix; all of a tensor that would not shrink."""

    def formula(shapes: Shapes, n: int) -> float:
        numbers = 0
        for shape in shapes:
            rows, columns = shape[0], math.prod(shape[1:])
            thin = rank * (rows + columns) if len(shape) > 1 else math.inf
            numbers += int(min(thin, math.prod(shape)))
        return 2 * (n - 1) / n * 4 * numbers

    return formula


def sparse(ratio: float) -> Formula:
    """Four bytes a value and as few as possible an index, all-gathered."""

    def formula(shapes: Shapes, n: int) -> float:
        return (n - 1) * sum(_entries_nbytes(ratio, math.prod(shape)) for shape in shapes)

    return formula


def _entries_nbytes(ratio: float, numel: int) -> float:
    count = max(1, int(ratio * numel))
    widths = ((256**width - 1, width) for width in (1, 2))  # blocks whose count fits the width
    short = (width * (count + math.ceil(numel / block)) for block, width in widths)
    return 4 * count + min(4 * count, *short)


def coded(bits: float, scales: Callable[[tuple[int, ...]], float]) -> Formula:
    """``bits`` an entry, and ``scales`` bytes a tensor, all-gathered."""

    def formula(shapes: Shapes, n: int) -> float:
        return (n - 1) * sum(bits / 8 * math.prod(shape) + scales(shape) for shape in shapes)

    return formula


def a_block(entries: int) -> Callable[[tuple[int, ...]], float]:
    """Return the bytes of one scale for each block of ``entries``."""
    return lambda shape: 4 * math.ceil(math.prod(shape) / entries)


def a_column(shape: tuple[int, ...]) -> float:
    """Return the bytes of two means per row of a matrix with long rows, else per tensor."""
    rows = len(shape) > 1 and math.prod(shape[1:]) >= LONG_ROW
    return 8 * (shape[0] if rows else 1)


def same_entries(ratio: float) -> Formula:
    """The same entries on all ranks, all-reduced; their indices are not sent."""
    return lambda shapes, n: sum(
        2 * (n - 1) / n * 4 * max(1, int(ratio * math.prod(shape))) for shape in shapes
    )


def merged_up(ratio: float) -> Formula:
    """Messages as long as one worker's, up a tree and down again: 2 (n - 1) messages by n ranks."""
    return lambda shapes, n: sparse(ratio)(shapes, n) * 2 / n


def factors(batch: int) -> Formula:
    """``batch * (rows + columns)`` numbers of a matrix, all-gathered; the rest is all-reduced."""

    def formula(shapes: Shapes, n: int) -> float:
        thin = [s for s in shapes if len(s) == 2 and batch * sum(s) < math.prod(s)]
        rest = [s for s in shapes if s not in thin]
        return (n - 1) * 4 * batch * sum(map(sum, thin)) + dense(4)(rest, n)

    return formula


def every(steps: int, formula: Formula) -> Formula:
    """A formula, once in ``steps`` steps."""
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
            "random_k(0.01)": same_entries(0.01),
            "gtopk(0.01)": merged_up(0.01),
            "sufficient_factors": factors(BATCH),
        }.items()
    },
}


class Sent(NamedTuple):
    """Bytes per step that a worker of one contender sent, at its sockets and at its device."""

    contender: str
    nbytes: float
    device_nbytes: float


def sent_rows(case: str, sent: Iterable[Sent], shapes: Shapes, workers: int) -> Iterable[Result]:
    """Yield rows for each technique with a formula: bytes sent, and how far they are from it."""
    known = [
        (f"{case}: {each.contender}", each, FORMULAS[each.contender](shapes, workers))
        for each in sent
        if each.contender in FORMULAS and each.nbytes > 0
    ]
    for name, each, nbytes in known:
        ratio = each.nbytes / nbytes
        yield Result(name, "bytes sent a step", each.nbytes / 1e6, "MB", "formula", ratio)
    for name, each, nbytes in known:
        megabytes, ratio = each.device_nbytes / 1e6, each.device_nbytes / nbytes
        yield Result(name, "bytes of the device, headers too", megabytes, "MB", "formula", ratio)
    for name, each, nbytes in known:
        off = abs(each.nbytes / nbytes - 1)
        passes = Threshold.parse(THRESHOLD).met(off)
        yield Result(name, "bytes off the formula", off, "", threshold=THRESHOLD, passes=passes)
