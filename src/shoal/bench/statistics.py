"""What may be concluded from timings on a noisy machine. Pure functions.

1. A block times three contenders once each: the *subject*, its *peer*, and the peer's *twin*, a
   second instance of the peer. The order changes from block to block (``ORDERS``).
2. Two neighbouring blocks differ by a swap of two contenders, first subject and peer, then peer
   and twin, and so on: AB BA for either pair. The ratio of such a pair of blocks is the geometric
   mean of both, in which every effect of position, and any steady drift, cancels.
3. The ratio is the median over pairs of blocks: a few that were disturbed move it little.
4. Its interval is the distribution-free one of the median, made of two order statistics. It needs
   neither a model of the noise nor random numbers, so the same timings give the same interval.
5. The control, twin against peer, tells how far apart equals seem to be. The half-width of its
   interval widens the bar; over ``MAX_HALF_WIDTH`` the machine is too noisy to tell: no verdict.
   Where it says so (``judged``), the ratio's own interval may tell nevertheless.

Hence a subject that meets its bar exactly fails it in about 2.5 % of the runs, and one that is
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
from typing import NamedTuple

from shoal.bench.form import Bar, Interval
from shoal.errors import BadArgument

MIN_BLOCKS = 40
MAX_HALF_WIDTH = 0.03
ORDERS = ((0, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 0), (1, 2, 0), (0, 2, 1))
"""Who runs when (0 subject, 1 peer, 2 twin); block ``i`` has the order ``i`` modulo 6."""


class Timings(NamedTuple):
    """Seconds of each contender, block by block."""

    subject: list[float]
    peer: list[float]
    twin: list[float]


@dataclass(frozen=True)
class Estimate:
    """A number and the interval it probably lies in."""

    value: float
    interval: Interval


@dataclass(frozen=True)
class Comparison:
    """How many times as long as its peer the subject takes, and the peer's twin."""

    ratio: Estimate
    control: Estimate

    def holds(self, bar: Bar) -> bool | None:
        """Whether the ratio keeps the bar, widened by the control; None when that is too wide."""
        return verdict(bar, self.ratio.value, half_width=self.control.interval.half_width)


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


def paired_ratios(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    """One ratio for each two blocks, AB and BA; an odd last block is left out.

    >>> paired_ratios([1.0, 4.0], [2.0, 2.0])
    (1.0,)
    """
    if len(one) != len(other):
        raise BadArgument(
            f"paired_ratios({len(one)} blocks, {len(other)} blocks)",
            "blocks come in pairs; time every contender in every block",
        )
    if any(not seconds > 0 for seconds in (*one, *other)):
        raise BadArgument("paired_ratios", "a block took no time; put more steps in a block")
    single = [a / b for a, b in zip(one, other, strict=True)]
    return tuple(math.sqrt(x * y) for x, y in zip(single[::2], single[1::2], strict=False))


def compare(timings: Timings) -> Comparison:
    """What the timings of at least ``MIN_BLOCKS`` blocks say."""
    subject, peer, twin = timings
    if len(peer) < MIN_BLOCKS:
        raise BadArgument(
            f"compare({len(peer)} blocks)", f"a timing needs at least {MIN_BLOCKS} blocks"
        )
    ratios = paired_ratios(subject, peer)
    controls = paired_ratios(twin[1:], peer[1:])  # peer and twin swap after every second block
    return Comparison(estimate(ratios), estimate(controls))


def settled(bar: Bar, ratio: Estimate) -> bool | None:
    """What a noisy machine can still tell: whether the whole interval is on one side of the bar."""
    ends = {bar.met(ratio.interval.low), bar.met(ratio.interval.high)}
    return ends.pop() if len(ends) == 1 else None


def judged(bar: Bar, ratio: Estimate, control: Estimate) -> bool | None:
    """The verdict by the control; where that is too wide, what is settled without it."""
    holds = verdict(bar, ratio.value, half_width=control.interval.half_width)
    return settled(bar, ratio) if holds is None else holds


def verdict(bar: Bar, number: float, *, half_width: float) -> bool | None:
    """Whether ``number`` keeps the bar, widened by the control; None when that is too wide."""
    if half_width > MAX_HALF_WIDTH:
        return None
    return bar.met(number, slack=half_width)
