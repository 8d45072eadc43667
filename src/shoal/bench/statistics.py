"""What may be concluded from timings on a noisy machine. Pure functions.

1. A block times three contenders once each: the *subject*, its *peer*, and the peer's *twin*, a
   second instance of the peer. The order changes from block to block (``ORDERS``).
2. Two neighbouring blocks differ by a swap of two contenders, first subject and peer, then peer
   and twin, and so on: AB BA for either pair. The ratio of such a pair of blocks is the geometric
   mean of both, in which every effect of position, and any steady drift, cancels.
3. The ratio is the median over pairs of blocks, so a few disturbed ones change it little.
4. Its interval is the distribution-free one of the median, made of two order statistics. It needs
   neither a model of the noise nor random numbers, so the same timings give the same interval.
5. The control, twin against peer, shows how far apart equal contenders seem to be. The half-width
   of its interval widens the threshold. Above ``MAX_HALF_WIDTH`` the machine is too noisy, and the
   verdict is inconclusive; ``lenient_verdict`` then still decides where the ratio's whole interval
   lies on one side of the threshold.

Hence a subject that meets its threshold exactly fails in about 2.5 % of the runs, and a better one
in fewer; the tests measure both.

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

from shoal.bench.report import Interval, Threshold
from shoal.errors import BadArgument

MIN_BLOCKS = 40
MAX_HALF_WIDTH = 0.03
ORDERS = ((0, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 0), (1, 2, 0), (0, 2, 1))
"""Order of the contenders (0 subject, 1 peer, 2 twin) in block ``i`` modulo 6."""


class Timings(NamedTuple):
    """Seconds of each contender, block by block."""

    subject: list[float]
    peer: list[float]
    twin: list[float]


@dataclass(frozen=True)
class Estimate:
    """A number and its confidence interval."""

    value: float
    interval: Interval


@dataclass(frozen=True)
class PairedEstimate:
    """Time of the subject, and of the peer's twin, each divided by the time of the peer."""

    ratio: Estimate
    control: Estimate

    def passes(self, threshold: Threshold) -> bool | None:
        """Return :func:`verdict` on the ratio, by the half-width of the control."""
        return verdict(threshold, self.ratio.value, half_width=self.control.interval.half_width)


def turns(block: int, count: int) -> list[int]:
    """Return the order in which ``count`` contenders run in a block.

    Neighbouring blocks 2i and 2i + 1 have opposite orders, so that every two contenders run AB BA.

    >>> turns(0, 3), turns(1, 3), turns(2, 3)
    ([0, 1, 2], [2, 1, 0], [1, 2, 0])
    """
    order = [(block // 2 + position) % count for position in range(count)]
    return order if block % 2 == 0 else order[::-1]


def slowest(workers: Sequence[Sequence[float]]) -> list[float]:
    """Return the longest time that any worker took, block by block."""
    return [max(block) for block in zip(*workers, strict=True)]


def interval_of_median(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the narrowest symmetric pair of order statistics that contains the median.

    The number of values below the true median is binomial(n, 1/2), so the k-th smallest and k-th
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
    """Return the median and its interval."""
    return Estimate(median(values), interval_of_median(values))


def paired_ratios(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    """Return one ratio for each two blocks, AB and BA; an odd last block is left out.

    >>> paired_ratios([1.0, 4.0], [2.0, 2.0])
    (1.0,)
    """
    if len(one) != len(other):
        call = f"paired_ratios({len(one)} blocks, {len(other)} blocks)"
        raise BadArgument(call, "blocks come in pairs; time every contender in every block")
    if any(not seconds > 0 for seconds in (*one, *other)):
        raise BadArgument("paired_ratios", "a block took no time; put more steps in a block")
    single = [a / b for a, b in zip(one, other, strict=True)]
    return tuple(math.sqrt(x * y) for x, y in zip(single[::2], single[1::2], strict=False))


def compare(timings: Timings) -> PairedEstimate:
    """Estimate the ratios from the timings of at least ``MIN_BLOCKS`` blocks."""
    subject, peer, twin = timings
    if len(peer) < MIN_BLOCKS:
        why = f"a timing needs at least {MIN_BLOCKS} blocks"
        raise BadArgument(f"compare({len(peer)} blocks)", why)
    ratios = paired_ratios(subject, peer)
    controls = paired_ratios(twin[1:], peer[1:])  # peer and twin swap after every second block
    return PairedEstimate(estimate(ratios), estimate(controls))


def verdict(threshold: Threshold, number: float, *, half_width: float) -> bool | None:
    """Return whether ``number`` meets the threshold, widened by the half-width of the control.

    None: that half-width is above ``MAX_HALF_WIDTH``, so the verdict is inconclusive.
    """
    if half_width > MAX_HALF_WIDTH:
        return None
    return threshold.met(number, slack=half_width)


def interval_verdict(threshold: Threshold, ratio: Estimate) -> bool | None:
    """Return the verdict if the whole interval lies on one side of the threshold, else None."""
    ends = {threshold.met(ratio.interval.low), threshold.met(ratio.interval.high)}
    return ends.pop() if len(ends) == 1 else None


def lenient_verdict(threshold: Threshold, ratio: Estimate, control: Estimate) -> bool | None:
    """Return the verdict by the control; where that is inconclusive, by the ratio's interval."""
    passes = verdict(threshold, ratio.value, half_width=control.interval.half_width)
    return interval_verdict(threshold, ratio) if passes is None else passes
