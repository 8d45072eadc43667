"""A rank that leaves or is late is named; see ``test_faults_each`` for those killed or stopped."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from shm_worlds import enter, gloo

from shoal.errors import FaultError, PeerLost
from shoal.runtime.world.error_context import explain, report_failure
from shoal.runtime.world.join import join, leave
from shoal.testing.processes import outcomes, run_workers

pytestmark = pytest.mark.gloo


def raising() -> str:
    rank, _ = enter(seconds=20)
    dist.barrier()
    if rank == 1:
        raise ValueError("bad sample")
    begin = time.monotonic()
    with pytest.raises(FaultError) as caught:
        dist.all_reduce(torch.ones(3))
    assert time.monotonic() - begin < 10
    return str(caught.value)


def test_a_rank_that_leaves_with_an_error_is_not_waited_for() -> None:
    first, second = outcomes(2, raising, seconds=30)
    assert second.error is not None
    assert "bad sample" in second.error
    assert "rank 1" in first.value


def fails() -> str:
    world = join(backend="shoal", seconds=20)
    if world.rank == 1:
        report_failure(world, ValueError("bad sample"))
        return ""
    try:
        with pytest.raises(PeerLost) as caught:
            dist.all_reduce(torch.ones(3))
        assert "rank 1" in str(caught.value)  # but not why
        better = explain(world, caught.value)
        assert explain(world, better) is better  # type: ignore[arg-type]
        return str(better)
    finally:
        if world.rank == 0:
            time.sleep(1)  # it hosts the store
        leave(world)


def test_a_rank_that_is_gone_is_explained_by_the_failure_that_it_published() -> None:
    first, _, third = run_workers(3, fails, seconds=40)
    assert first == third == "rank 1 failed: ValueError: bad sample"


def late() -> str:
    rank, _ = enter(seconds=1)
    dist.all_reduce(torch.ones(3))
    if rank == 0:
        with pytest.raises(FaultError) as caught:
            dist.broadcast(torch.ones(4), 0)
        return str(caught.value)
    time.sleep(2)
    with pytest.raises(FaultError) as caught:
        dist.broadcast(torch.ones(4), 0)
    return str(caught.value)


def test_a_rank_that_comes_too_late_learns_that_the_others_gave_up() -> None:
    first, second = run_workers(2, late, seconds=20)
    assert "broadcast from 0 of float32 x 4: not done within 1 s" in first
    assert "its last collective was all_reduce (sum) of float32 x 3" in first
    assert "rank 0 gave up" in second


def watched() -> str:
    rank, _ = enter()
    other = gloo()
    alone = dist.new_group([0], backend="shoal")
    dist.monitored_barrier()
    dist.monitored_barrier(other)  # is torch's, as it was
    if rank == 0:
        dist.monitored_barrier(alone, timeout=timedelta(seconds=5))
    if rank != 1:
        with pytest.raises(FaultError) as caught:
            dist.monitored_barrier(timeout=1.5, wait_all_ranks=True)
        return str(caught.value)
    time.sleep(4)
    return ""


def test_torchs_monitored_barrier_names_who_did_not_come() -> None:
    first, _, third = run_workers(3, watched, seconds=40)
    for told in (first, third):
        assert "monitored_barrier: not done within 1.5 s" in told
        assert "rank 1" in told
