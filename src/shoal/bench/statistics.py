"""Estimate ratios of times on a noisy machine, and decide whether they meet a threshold.

1. A block times three contenders once each: the *subject*, its *peer*, and the peer's *twin*, a
   second instance of the peer. The order changes from block to block (``ORDERS``).
2. From one block to the next, two contenders swap places: first subject and peer, then peer and
   twin, and so on. So subject and peer, as well as peer and twin, run as AB BA in two consecutive
   blocks. The ratio of a pair of blocks is the geometric mean of its two ratios. In this mean, the
   effect of the position in a block and a steady drift cancel.
3. The ratio is the median over pairs of blocks, so a few disturbed pairs change it little.
4. The interval is made of two order statistics. It assumes no distribution of the noise and uses no
   random numbers, so the same timings give the same interval.
5. The control, the ratio of twin to peer, shows how much equal contenders differ. The half-width of
   its interval is added to the threshold. If the half-width is above ``MAX_HALF_WIDTH``, the
   machine is too noisy, and the verdict is inconclusive. ``lenient_verdict`` then still
   decides if the whole interval of the ratio lies on one side of the threshold.

Hence a subject whose true ratio is equal to its threshold fails in about 2.5 % of the runs, and a
faster subject fails in fewer runs. The tests measure both shares.

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
"""``ORDERS[i % 6]`` is the order of the contenders (0 subject, 1 peer, 2 twin) in block ``i``."""


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
    """The time of the subject (``ratio``) and of the twin (``control``), divided by the peer's."""

    ratio: Estimate
    control: Estimate

    def passes(self, threshold: Threshold) -> bool | None:
        """Return the :func:`verdict` on the ratio, with the half-width of the control."""
        return verdict(threshold, self.ratio.value, half_width=self.control.interval.half_width)


def turns(block: int, count: int) -> list[int]:
    """Return the order in which ``count`` contenders run in a block.

    Blocks 2i and 2i + 1 have opposite orders, so that every two contenders run as AB BA.

    >>> turns(0, 3), turns(1, 3), turns(2, 3)
    ([0, 1, 2], [2, 1, 0], [1, 2, 0])
    """
    order = [(block // 2 + position) % count for position in range(count)]
    return order if block % 2 == 0 else order[::-1]


def slowest(workers: Sequence[Sequence[float]]) -> list[float]:
    """Return the time of the slowest worker, block by block."""
    return [max(block) for block in zip(*workers, strict=True)]


def interval_of_median(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return a confidence interval of the median: the k-th smallest and the k-th largest value.

    The number of values below the true median is binomial(n, 1/2), so the two values enclose it
    with probability ``1 - 2 P(binomial < k)``. k is the largest number for which this probability
    is at least ``confidence``.
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
    """Return the median of the values and its 95 % confidence interval."""
    return Estimate(median(values), interval_of_median(values))


def paired_ratios(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    """Return one ratio (one / other) for each pair of blocks; an odd last block is left out.

    >>> paired_ratios([1.0, 4.0], [2.0, 2.0])
    (1.0,)
    """
    if len(one) != len(other):
        call = f"paired_ratios({len(one)} blocks, {len(other)} blocks)"
        raise BadArgument(call, "both must have the same number of blocks")
    if any(not seconds > 0 for seconds in (*one, *other)):
        raise BadArgument("paired_ratios", "a block's time is not positive; put more steps in it")
    single = [a / b for a, b in zip(one, other, strict=True)]
    return tuple(math.sqrt(x * y) for x, y in zip(single[::2], single[1::2], strict=False))


def compare(timings: Timings) -> PairedEstimate:
    """Return the ratio and the control, from the timings of at least ``MIN_BLOCKS`` blocks."""
    subject, peer, twin = timings
    if len(peer) < MIN_BLOCKS:
        why = f"a timing needs at least {MIN_BLOCKS} blocks"
        raise BadArgument(f"compare({len(peer)} blocks)", why)
    ratios = paired_ratios(subject, peer)
    controls = paired_ratios(twin[1:], peer[1:])  # peer and twin swap between blocks 1 and 2
    return PairedEstimate(estimate(ratios), estimate(controls))


def verdict(threshold: Threshold, number: float, *, half_width: float) -> bool | None:
    """Return whether ``number`` meets the threshold, made easier by ``half_width`` of the control.

    Returns None (inconclusive) if ``half_width`` is above ``MAX_HALF_WIDTH``.
    """
    if half_width > MAX_HALF_WIDTH:
        return None
    return threshold.met(number, slack=half_width)


def interval_verdict(threshold: Threshold, ratio: Estimate) -> bool | None:
    """Return whether the whole interval meets the threshold; None if only one end does."""
    ends = {threshold.met(ratio.interval.low), threshold.met(ratio.interval.high)}
    return ends.pop() if len(ends) == 1 else None


def lenient_verdict(threshold: Threshold, ratio: Estimate, control: Estimate) -> bool | None:
    """Return :func:`verdict`; if that is None, return :func:`interval_verdict`."""
    passes = verdict(threshold, ratio.value, half_width=control.interval.half_width)
    return interval_verdict(threshold, ratio) if passes is None else passes
