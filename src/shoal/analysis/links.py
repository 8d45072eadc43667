"""Links: how long a message of n bytes takes, fitted to measurements.

The model is Hockney's ``alpha + beta n``: seconds per message and seconds per byte. One line is
often not enough, because libraries change the protocol with the size (on logs of MPI over 10GbE it
is 8 to 20 % off). So a link may have a knee, from which another line applies.

Errors are relative to the measured time: otherwise those of large messages would outweigh those of
small ones, and it is for small messages that the choice between routes matters.

References:
    Hockney, `The communication challenge for MPP <https://doi.org/10.1016/S0167-8191(06)80021-9>`_,
    1994.
    Huber, `Robust estimation of a location parameter
    <https://doi.org/10.1214/aoms/1177703732>`_, 1964.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.errors import BadArgument

Point = tuple[float, float]
"""A measured (nbytes, seconds)."""

_HUBER = 1.345  # errors beyond so many deviations count linearly: 95 % efficient on clean data
_ROUNDS = 30  # of reweighting; it converges in about ten


class Piece(NamedTuple):
    """The line for messages of ``start`` bytes and more."""

    start: float
    alpha: float
    beta: float


class Link(NamedTuple):
    """A message takes ``alpha + beta * nbytes`` seconds, up to the first knee.

    Args:
        alpha: seconds per message.
        beta: seconds per byte.
        knees: lines for larger messages, in the order of ``start``.
    """

    alpha: float
    beta: float
    knees: tuple[Piece, ...] = ()

    def cost(self, nbytes: float) -> float:
        """Return the seconds that one message of ``nbytes`` takes."""
        line = Piece(0, self.alpha, self.beta)
        for knee in self.knees:
            if knee.start <= nbytes:
                line = knee
        return line.alpha + line.beta * nbytes


def fit(points: Sequence[Point], *, pieces: int = 1, robust: bool = True) -> Link:
    """Return the link with the least relative error on measured points.

    Args:
        points: (nbytes, seconds) pairs, in any order, with at least two different sizes per piece.
        pieces: 1, or 2 to look for a knee; the second line is never below the first at the knee,
            and there is no knee if none reduces the error.
        robust: reduce the weight of outliers by Huber's rule.
    """
    call = f"fit({len(points)} points, pieces={pieces})"
    if pieces not in (1, 2):
        raise BadArgument(call, "pieces must be 1 or 2")
    if any(not (0 <= n < float("inf") and 0 < s < float("inf")) for n, s in points):
        raise BadArgument(call, "sizes must be finite and >= 0, seconds finite and > 0")
    ordered = sorted(points)
    if len({n for n, _ in ordered}) < 2:
        raise BadArgument(call, "a line needs at least two different sizes; measure more")
    cut = _knee(ordered) if pieces == 2 else None
    solve = _robust_line if robust else _line
    if cut is None:
        return Link(*solve(ordered))
    left, right = ordered[:cut], ordered[cut:]
    return Link(*solve(left), (Piece(right[0][0], *solve(right)),))


def mape(link: Link, points: Sequence[Point]) -> float:
    """Return the mean absolute percentage error of the link on these points."""
    return 100 * statistics.fmean(abs(link.cost(n) - s) / s for n, s in points)


def measure(
    exchange: Callable[[int], object],
    sizes: Sequence[int],
    *,
    clock: Callable[[], float] = time.perf_counter,
    repeats: int = 5,
) -> list[tuple[int, float]]:
    """Time ``exchange(nbytes)`` at each size, and return the medians, as :func:`fit` takes them.

    Sizes are interleaved, so that a slow phase of the machine affects all of them. One pass before
    is not counted (connections, buffers, caches).

    Args:
        exchange: sends and receives one message of that many bytes, and returns when it is done.
        sizes: in bytes.
        clock: returns the time in seconds; may be virtual.
        repeats: how often each size is timed.
    """
    if repeats < 1:
        raise BadArgument(f"measure(repeats={repeats})", "must be at least 1")
    seconds: dict[int, list[float]] = {nbytes: [] for nbytes in sizes}
    for nbytes in seconds:
        exchange(nbytes)
    for _ in range(repeats):
        for nbytes, times in seconds.items():
            start = clock()
            exchange(nbytes)
            times.append(clock() - start)
    return [(nbytes, statistics.median(times)) for nbytes, times in seconds.items()]


def _line(points: Sequence[Point], trust: Sequence[float] | None = None) -> tuple[float, float]:
    """Return the non-negative (alpha, beta) with the least ``sum trust * (error / seconds)^2``."""
    weights = [t / (s * s) for t, (_, s) in zip(trust or [1.0] * len(points), points, strict=True)]
    total = sum(weights)
    x = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
    y = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
    spread = sum(w * (n - x) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    slope = sum(w * (n - x) * (s - y) for w, (n, s) in zip(weights, points, strict=True))
    beta = slope / spread
    if beta < 0:  # the best admissible line is flat
        return y, 0.0
    if y - beta * x < 0:  # or goes through the origin
        return 0.0, (slope + total * x * y) / (spread + total * x * x)
    return y - beta * x, beta


def _errors(line: tuple[float, float], points: Sequence[Point]) -> list[float]:
    alpha, beta = line
    return [abs(alpha + beta * n - s) / s for n, s in points]


def _robust_line(points: Sequence[Point]) -> tuple[float, float]:
    """Fit by iteratively reweighted least squares with Huber's weights."""
    line = _line(points)
    for _ in range(_ROUNDS):
        errors = _errors(line, points)
        bound = max(_HUBER * statistics.median(errors) / 0.6745, 1e-9)  # MAD -> deviation
        line = _line(points, [min(1.0, bound / e) if e else 1.0 for e in errors])
    return line


def _knee(points: Sequence[Point]) -> int | None:
    """Return the index at which two lines fit best; None if one line fits as well."""
    one = sum(e * e for e in _errors(_line(points), points))
    best, where = one - 1e-12 * len(points), None  # a relative 1e-6 is not worth a knee
    for cut in range(1, len(points)):
        left, right = points[:cut], points[cut:]
        if left[-1][0] == right[0][0] or left[0][0] == left[-1][0] or right[0][0] == right[-1][0]:
            continue  # the same size on both sides, or a side with one size
        low, high = _line(left), _line(right)
        if high[0] + high[1] * right[0][0] < low[0] + low[1] * right[0][0]:
            continue  # larger messages would be faster: noise, not a protocol
        loss = sum(e * e for e in _errors(low, left) + _errors(high, right))
        if loss < best:
            best, where = loss, cut
    return where
