"""On several hosts the collectives give what they give on one."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shm_worlds import enter
from test_collectives_random import sequence

from shoal.errors import FaultError, LayoutMismatch
from shoal.testing.processes import outcomes, run_workers
from shoal.wire.shm import allocate
from shoal.wire.shm.multinode import TRIES

pytestmark = pytest.mark.gloo


def apart(hosts: str, work: Any, *args: Any) -> Any:
    """Run as if ranks were on the hosts named by one letter each."""
    os.environ["SHOAL_HOST_KEY"] = hosts[int(os.environ["RANK"])]
    return work(*args)


@pytest.mark.parametrize("hosts", ["aabb", "aab", "ab", "abab"])
def test_a_random_sequence_on_several_hosts_gives_what_gloo_gives(hosts: str) -> None:
    assert sum(run_workers(len(hosts), apart, hosts, sequence, 5, 25)) > 10


def everything() -> None:
    rank, size = enter()
    world = dist.group.WORLD
    assert type(world._collectives).__name__ == "MultiNodeCollectives"
    mean = torch.full((100_000,), float(rank))
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert mean.eq((size - 1) / 2).all()
    flags = torch.zeros(3, dtype=torch.bool).logical_or(torch.tensor(rank == 1))
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    assert flags.all()
    x = torch.full((14,), float(rank))[::2]
    if rank == 0:
        dist.send(x, size - 1, tag=2)
    if rank == size - 1:
        dist.recv(x, 0, tag=2)
        assert x.eq(0).all()
    shared = allocate(50_000, torch.float32)
    dist.all_reduce(shared.fill_(1))
    assert shared.eq(size).all()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, rank)
    assert objects == list(range(size))
    dist.barrier()


@pytest.mark.parametrize("hosts", ["aabb", "aab"])
def test_means_flags_messages_buckets_and_objects_cross_hosts(hosts: str) -> None:
    run_workers(len(hosts), apart, hosts, everything)


def twice() -> float:
    rank, size = enter(20)
    x, got = torch.full((5,), float(rank)), torch.zeros(5, 2).t()[0]
    works = [dist.isend(x, (rank + 1) % size), dist.irecv(got, (rank - 1) % size)]
    for work in works * 2:  # gloo itself would wait for another message
        assert work is not None
        work.wait()
        assert work.is_completed()
    return float(got.sum())


def test_a_message_between_hosts_may_be_waited_for_again() -> None:
    assert run_workers(2, apart, "ab", twice) == [5.0, 0.0]


def lost(call: str) -> str:
    (rank, _), x = enter(20), torch.ones(4)
    dist.barrier()
    if rank == 3:
        os._exit(0)
    time.sleep(0.5)
    calls = {"send": send_on, "receive": partial(dist.recv, x, 3)}
    with pytest.raises(FaultError) as caught:
        calls.get(call, partial(dist.all_reduce, x))()
    return str(caught.value)


def send_on() -> None:
    for _ in range(20):  # the first may still find room in a buffer
        dist.send(torch.ones(4), 3)
        time.sleep(0.05)


@pytest.mark.parametrize("call", ["send", "receive", "all_reduce"])
def test_who_is_lost_on_another_host_is_named(call: str) -> None:
    first = outcomes(4, apart, "aabb", lost, call, seconds=45)[0]
    whom = "one of the ranks 2, 3" if call == "all_reduce" else "rank 3"
    assert first.value is not None, first.error
    assert call in first.value
    assert f"communication with {whom} over gloo failed" in first.value


def mismatch() -> str:
    rank, _ = enter()
    with pytest.raises(LayoutMismatch) as caught:
        dist.all_reduce(torch.zeros(3 + rank // 2))
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.eq(4).all()
    return str(caught.value)


def test_hosts_that_call_different_things_are_told_both_sides() -> None:
    for told in run_workers(4, apart, "aabb", mismatch):
        assert "float32 x 3 on rank 0, 1" in told
        assert "float32 x 4 on rank 2, 3" in told


def order() -> int:
    rank, _ = enter()
    x = torch.randn(30_001, generator=torch.Generator().manual_seed(rank)) * 10 ** (3 * rank)
    dist.all_reduce(x)
    return int(x.view(torch.int32).sum())


def test_all_ranks_of_all_hosts_get_the_same_bits() -> None:
    assert len({*run_workers(4, apart, "aabb", order), *run_workers(4, apart, "aabb", order)}) == 1


def measured() -> tuple[dict[int, int], set[int]]:
    """What was chosen for three sizes, and the sums of the bits of all results of the larger."""
    rank, _ = enter()
    given = torch.randn(40_000, generator=torch.Generator().manual_seed(rank)) * 10 ** (3 * rank)
    found = set()
    for _ in range(2 * TRIES + 1):
        x, scalar = given.clone(), given[:1].clone()
        dist.all_reduce(x)
        dist.all_reduce(scalar)
        dist.all_reduce(given[:0].clone())
        assert scalar.isfinite().all()
        found.add(int(x.view(torch.int32).sum()))
    return dist.group.WORLD._collectives.leaders.chosen, found


def test_all_ranks_choose_the_same_leaders_and_bits_do_not_depend_on_it() -> None:
    told = run_workers(4, apart, "aabb", measured)
    assert [chosen for chosen, _ in told] == [told[0][0]] * 4
    assert {(160_000).bit_length(), (4).bit_length(), 0} == {*told[0][0]}
    assert all(found == told[0][1] and len(found) == 1 for _, found in told)


@pytest.mark.parametrize("hosts", ["aab", "ab"])
def test_where_one_rank_has_to_lead_nothing_is_measured(hosts: str) -> None:
    assert all(not chosen for chosen, _ in run_workers(len(hosts), apart, hosts, measured))
