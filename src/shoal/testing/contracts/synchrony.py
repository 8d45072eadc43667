"""Laws of every synchrony. No worker starts too far ahead, and one may always start."""

from __future__ import annotations

import math
import random

from shoal.axes.synchrony import Synchrony
from shoal.runtime.remote.model_store import Clocks
from shoal.testing.contracts.require import require


def its_numbers_make_sense(synchrony: Synchrony) -> None:
    """The period is a whole number >= 1. Staleness is a number >= 0, or inf."""
    period, staleness = synchrony.period, synchrony.staleness
    require(isinstance(period, int) and period >= 1, f"{synchrony}: bad period {period}")
    require(staleness >= 0, f"{synchrony}: staleness is {staleness}, but must be >= 0")


def waiting_and_freedom_are_the_ends_of_staleness(synchrony: Synchrony) -> None:
    """``waits`` means staleness 0, and ``free`` means staleness inf."""
    require(synchrony.waits == (synchrony.staleness == 0), f"{synchrony}: waits is wrong")
    require(synchrony.free == math.isinf(synchrony.staleness), f"{synchrony}: free is wrong")


def no_worker_starts_further_ahead_than_the_bound(synchrony: Synchrony) -> None:
    """A starting worker is at most ``staleness`` steps ahead. One worker may always start."""
    chance = random.Random(0)
    for workers in (1, 2, 5):
        clocks = Clocks(range(workers), synchrony.staleness)
        for _ in range(60):
            ready = [i for i in range(workers) if clocks.may_go(i)]
            require(bool(ready), f"{synchrony}: all {workers} workers wait for each other")
            worker = chance.choice(ready)
            ahead = clocks.steps[worker] - min(clocks.steps.values())
            require(ahead <= synchrony.staleness, f"{synchrony}: worker {worker} is {ahead} ahead")
            clocks.tick(worker)


LAWS = (
    its_numbers_make_sense,
    waiting_and_freedom_are_the_ends_of_staleness,
    no_worker_starts_further_ahead_than_the_bound,
)
