"""Laws of every synchrony: a bound on staleness, and no deadlock."""

from __future__ import annotations

import math
import random

from shoal.axes.synchrony import Synchrony
from shoal.runtime.remote.model_store import Clocks
from shoal.testing.contracts.require import require


def its_numbers_make_sense(synchrony: Synchrony) -> None:
    """A period is a whole number from 1 up; staleness is a number from 0 up, or inf."""
    period, staleness = synchrony.period, synchrony.staleness
    require(isinstance(period, int) and period >= 1, f"{synchrony}: period {period}")
    require(staleness >= 0 and not math.isnan(staleness), f"{synchrony}: staleness {staleness}")


def waiting_and_freedom_are_the_ends_of_staleness(synchrony: Synchrony) -> None:
    """Staleness 0 waits for all, inf for none."""
    require(synchrony.waits == (synchrony.staleness == 0), f"{synchrony}: waits")
    require(synchrony.free == math.isinf(synchrony.staleness), f"{synchrony}: free")


def no_worker_starts_further_ahead_than_the_bound(synchrony: Synchrony) -> None:
    """A step starts at most ``staleness`` clocks ahead of the slowest; one may always start."""
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
