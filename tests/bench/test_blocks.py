"""Blocks in real worker processes, with DDP and a bare loop as contenders."""

from __future__ import annotations

import pytest

from shoal.bench.blocks import TimingPlan, measure
from shoal.bench.statistics import compare, slowest
from shoal.testing.processes import WorkersFailed


def test_a_block_is_as_long_as_its_slowest_worker() -> None:
    assert slowest([[1.0, 5.0], [2.0, 4.0]]) == [2.0, 5.0]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("subject", "peer", "workers"), [("bare", "bare", 1), ("ddp, local buffers", "ddp", 2)]
)
def test_every_contender_is_timed_in_every_block(subject: str, peer: str, workers: int) -> None:
    plan = TimingPlan("tiny", subject, peer, workers, blocks=40, steps=5)
    told: list[tuple[int, int]] = []
    timings = measure(plan, lambda *each: told.append(each))
    assert [len(each) for each in timings] == [40, 40, 40]
    assert compare(timings).ratio.value > 0
    assert all(0 < done <= total == 40 for done, total in told)
    assert told == sorted(told)


@pytest.mark.gloo
def test_a_worker_that_fails_ends_the_measurement_with_its_traceback() -> None:
    with pytest.raises(WorkersFailed, match="nobody"):
        measure(TimingPlan("tiny", "nobody", "bare", workers=1, blocks=1), lambda *each: None)
