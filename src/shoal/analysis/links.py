"""Fit a function from bytes to seconds of a message (a link) to measurements.

The model is Hockney's ``alpha + beta * n`` for n bytes: alpha is seconds per message, beta seconds
per byte. One line is often not enough, because libraries use another protocol for large messages
(on logs of MPI over 10GbE one line is 8 to 20 % off). So a link may have a knee: a size from which
on another line is used.

Errors are divided by the measured seconds. Otherwise the errors of large messages would outweigh
those of small ones, although the choice between routes matters most for small messages.

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
"""One measurement: (nbytes, seconds)."""

_HUBER = 1.345  # Huber's k: errors above k standard deviations count linearly, not squared
_ROUNDS = 30  # number of reweighting rounds, of which about ten are enough


class Piece(NamedTuple):
    """The line ``alpha + beta * nbytes`` for messages of ``start`` bytes or more."""

    start: float
    alpha: float
    beta: float


class Link(NamedTuple):
    """A message takes ``alpha + beta * nbytes`` seconds, up to the first knee.

    Args:
        alpha: seconds per message.
        beta: seconds per byte.
        knees: lines for larger messages, sorted by ``start``.
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
    """Return the link that fits the measured points by least squares of the relative errors.

    Args:
        points: (nbytes, seconds) pairs in any order, with at least two different sizes.
        pieces: 1 fits one line. 2 searches for a knee, without Huber's rule, and fits two lines if
            this reduces the error. The second line must not be below the first at the knee.
        robust: whether to reduce the weight of outliers by Huber's rule.
    """
    call = f"fit({len(points)} points, pieces={pieces})"
    if pieces not in (1, 2):
        raise BadArgument(call, "pieces must be 1 or 2")
    if any(not (0 <= n < float("inf") and 0 < s < float("inf")) for n, s in points):
        raise BadArgument(call, "sizes must be finite and >= 0, seconds finite and > 0")
    ordered = sorted(points)
    if len({n for n, _ in ordered}) < 2:
        raise BadArgument(call, "a line needs at least two different sizes; measure more sizes")
    cut = _knee(ordered) if pieces == 2 else None
    fit_line = _robust_line if robust else _line
    if cut is None:
        return Link(*fit_line(ordered))
    left, right = ordered[:cut], ordered[cut:]
    return Link(*fit_line(left), (Piece(right[0][0], *fit_line(right)),))


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
    """Time ``exchange(nbytes)`` at each size; return pairs (nbytes, median seconds).

    All sizes are timed once in each repeat, so that a slow phase of the machine affects all sizes.
    A first pass is not counted: it opens connections and allocates buffers.

    Args:
        exchange: sends and receives one message of ``nbytes``, and returns when it is done.
        sizes: message sizes in bytes.
        clock: returns the time in seconds, which may be virtual.
        repeats: how often each size is timed.
    """
    if repeats < 1:
        raise BadArgument(f"measure(repeats={repeats})", "repeats must be at least 1")
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
    """Return the non-negative (alpha, beta) with the least ``sum(trust * (error / seconds)^2)``."""
    weights = [t / (s * s) for t, (_, s) in zip(trust or [1.0] * len(points), points, strict=True)]
    total = sum(weights)
    x = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
    y = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
    spread = sum(w * (n - x) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    slope = sum(w * (n - x) * (s - y) for w, (n, s) in zip(weights, points, strict=True))
    beta = slope / spread
    if beta < 0:  # the best line with beta >= 0 is horizontal
        return y, 0.0
    if y - beta * x < 0:  # the best line with alpha >= 0 goes through the origin
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
        bound = max(_HUBER * statistics.median(errors) / 0.6745, 1e-9)  # / 0.6745: MAD -> sigma
        line = _line(points, [min(1.0, bound / e) if e else 1.0 for e in errors])
    return line


def _knee(points: Sequence[Point]) -> int | None:
    """Return the index of the first point of the second line, or None if one line fits as well."""
    one = sum(e * e for e in _errors(_line(points), points))
    best, where = one - 1e-12 * len(points), None  # a knee must lower the mean square by 1e-12
    for cut in range(1, len(points)):
        left, right = points[:cut], points[cut:]
        if left[-1][0] == right[0][0] or left[0][0] == left[-1][0] or right[0][0] == right[-1][0]:
            continue  # the cut is between two equal sizes, or one side has only one size
        low, high = _line(left), _line(right)
        if high[0] + high[1] * right[0][0] < low[0] + low[1] * right[0][0]:
            continue  # at the knee a larger message would be faster, which can only be noise
        loss = sum(e * e for e in _errors(low, left) + _errors(high, right))
        if loss < best:
            best, where = loss, cut
    return where
