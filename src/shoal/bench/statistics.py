"""What may be concluded from timings on a noisy machine. Pure functions.

1. Two contenders run in *blocks*, side by side, in alternating order: AB BA AB BA ...
2. Two neighbouring blocks of opposite order are a palindrome, ABBA. Its ratio is the geometric
   mean of the two, in which the advantage of going first, and any steady drift, cancel.
3. The ratio is the median over palindromes: one block that a neighbour disturbed moves it little.
4. Its interval is the distribution-free one of the median, made of two order statistics. It needs
   neither a model of the noise nor random numbers, so the same timings give the same interval.
5. A control, the same contender against itself in the same run, tells how far apart equals seem
   to be. The half-width of its interval widens the bar; over ``MAX_HALF_WIDTH`` the machine is
   too noisy to tell and there is no verdict.

Hence a contender that meets its bar exactly fails it in about 2.5 % of the runs, and one that is
better in fewer; the tests measure both.

References:
    Hahn & Meeker, *Statistical Intervals*, 1991, section 5.2 (interval of a quantile).
    Hoefler & Belli, `Scientific benchmarking of parallel computing systems
    <https://doi.org/10.1145/2807591.2807644>`_, 2015 (medians with such intervals).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from shoal.bench.form import Bar, Interval
from shoal.errors import BadArgument

MIN_BLOCKS = 40
MAX_HALF_WIDTH = 0.03


@dataclass(frozen=True)
class Estimate:
    """A number and the interval it probably lies in."""

    value: float
    interval: Interval


def order(block: int, contenders: int) -> tuple[int, ...]:
    """In which order the contenders of a block run: forwards, then backwards, and so on."""
    forwards = tuple(range(contenders))
    return forwards if block % 2 == 0 else forwards[::-1]


def interval_of_median(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The narrowest symmetric pair of order statistics that holds the median so probably.

    The number of values under the true median is binomial(n, 1/2), so the k-th smallest and k-th
    largest enclose it with probability ``1 - 2 P(binomial < k)``, whatever the distribution.
    """
    ordered, n = sorted(values), len(values)
    spare = (1 - confidence) / 2
    k, below = 0, 1 / 2**n  # below: P(binomial <= k)
    while k < n // 2 and below <= spare:
        k += 1
        below += math.comb(n, k) / 2**n
    if k == 0:
        raise BadArgument(f"interval_of_median({n} values)", f"too few for {confidence:.0%}")
    return Interval(ordered[k - 1], ordered[n - k])


def estimate(values: Sequence[float]) -> Estimate:
    """The median, and its interval."""
    return Estimate(median(values), interval_of_median(values))


def paired_ratios(subject: Sequence[float], against: Sequence[float]) -> tuple[float, ...]:
    """One ratio for each palindrome of blocks; an odd last block is left out.

    >>> paired_ratios([1.0, 4.0], [2.0, 2.0])
    (1.0,)
    """
    if len(subject) != len(against):
        raise BadArgument(
            f"paired_ratios({len(subject)} blocks, {len(against)} blocks)",
            "blocks come in pairs; time both contenders in every block",
        )
    if any(not seconds > 0 for seconds in (*subject, *against)):
        raise BadArgument("paired_ratios", "a block took no time; put more steps in a block")
    single = [a / b for a, b in zip(subject, against, strict=True)]
    return tuple(math.sqrt(x * y) for x, y in zip(single[::2], single[1::2], strict=False))


def compare(subject: Sequence[float], against: Sequence[float]) -> Estimate:
    """How many times as long ``subject`` takes as ``against``, block by block."""
    if len(subject) < MIN_BLOCKS:
        raise BadArgument(
            f"compare({len(subject)} blocks)", f"a timing needs at least {MIN_BLOCKS} blocks"
        )
    return estimate(paired_ratios(subject, against))


def verdict(bar: Bar, number: float, *, half_width: float) -> bool | None:
    """Whether ``number`` keeps the bar, widened by the control; None when that is too wide."""
    if half_width > MAX_HALF_WIDTH:
        return None
    return bar.met(number, slack=half_width)
