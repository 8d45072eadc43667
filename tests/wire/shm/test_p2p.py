"""Messages between two ranks arrive whole, in order, by tag, from whom they are awaited."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shm_worlds import enter

from shoal.errors import ExchangeTimeout, LayoutMismatch, PeerLost
from shoal.testing.processes import run_workers
from shoal.wire.shm.memory.barrier import PRESENT, Barrier
from shoal.wire.shm.node.p2p_queues import P2PWork

pytestmark = pytest.mark.gloo


def sizes() -> None:
    rank, _ = enter()
    for numel in (0, 1, 1000, 100_000, 1_000_003):
        x = torch.arange(float(numel))
        if rank == 0:
            dist.send(x, 1)
            dist.recv(x.zero_(), 1)
            assert x.equal(torch.arange(float(numel)) + 1)
        else:
            y = torch.zeros(numel)
            assert dist.recv(y, 0) == 0
            assert y.equal(x)
            dist.send(y + 1, 0)


@pytest.mark.parametrize("direct", ["0", "inf"])
def test_messages_of_every_size_arrive_whole(direct: str) -> None:
    run_workers(2, sizes, env={"SHOAL_SHM_DIRECT_MB": direct})


def tags() -> None:
    rank, _ = enter()
    if rank == 0:
        works = [dist.isend(torch.full((50_000,), float(t)), 1, tag=t) for t in range(5)]
        for work in works:
            work.wait()
    else:
        for tag in (3, 0, 4, 2, 1):
            x = torch.zeros(50_000)
            dist.recv(x, 0, tag=tag)
            assert x.eq(tag).all()
    dist.barrier()
    for i in range(20):  # one tag keeps its order
        x = torch.full((3,), float(i))
        if rank == 0:
            dist.send(x, 1, tag=7)
        else:
            y = torch.zeros(3)
            dist.recv(y, 0, tag=7)
            assert y.equal(x)


@pytest.mark.parametrize("direct", ["0", "inf"])
def test_tags_may_be_taken_in_another_order_and_each_keeps_its_own(direct: str) -> None:
    run_workers(2, tags, env={"SHOAL_SHM_DIRECT_MB": direct})


def anyone() -> None:
    rank, size = enter()
    if rank:
        dist.send(torch.full((10,), float(rank)), 0)
        return
    seen = set()
    for _ in range(size - 1):
        x = torch.zeros(10)
        source = dist.recv(x)
        assert x.eq(source).all()
        seen.add(source)
    assert seen == set(range(1, size))


@pytest.mark.parametrize("direct", ["0", "inf"])
def test_a_message_from_anyone_tells_whom_it_is_from(direct: str) -> None:
    run_workers(4, anyone, env={"SHOAL_SHM_DIRECT_MB": direct})


def exchange() -> None:
    rank, size = enter()
    right, left = (rank + 1) % size, (rank - 1) % size
    big = torch.full((400_000,), float(rank))  # longer than a ring
    got = torch.zeros(800_000)[::2]
    swaps = [dist.P2POp(dist.isend, big, right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(swaps):
        work.wait()
    assert got.eq(left).all()
    dist.all_reduce(big)  # beside collectives


def test_everyone_may_send_and_receive_at_once() -> None:
    run_workers(3, exchange)


def behind() -> None:
    rank, _ = enter()
    x = torch.full((1_000_000,), float(rank))
    work = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
    while not work.is_completed():  # nobody waits: it goes on by itself
        torch.ones(100).sum()
    assert x.eq(0).all()
    dist.barrier()


def test_messages_go_on_while_nobody_waits_for_them() -> None:
    run_workers(2, behind)


def misfit() -> str:
    rank, _ = enter()
    if rank == 0:
        dist.send(torch.zeros(5), 1)
        dist.send(torch.ones(3), 1)
        return ""
    with pytest.raises(LayoutMismatch) as caught:
        dist.recv(torch.zeros(3), 0)
    x = torch.zeros(3)
    dist.recv(x, 0)
    assert x.eq(1).all()
    return str(caught.value)


def test_a_message_of_another_size_is_an_error_and_the_next_one_arrives() -> None:
    assert "rank 0 sent 20 bytes, but the tensor here has 12" in run_workers(2, misfit)[1]


def impatient() -> float:
    rank, _ = enter()
    x = torch.zeros(3)
    if rank == 0:
        dist.barrier()
        dist.send(x + 1, 1)
        return 0.0
    work = dist.irecv(x, 0)
    assert work is not None
    with pytest.raises(ExchangeTimeout, match=r"message \(tag 0\) is not done within 0.2 s"):
        work.wait(timedelta(seconds=0.2))
    dist.barrier()
    work.wait()  # it went on
    return float(x.sum())


def test_who_waits_for_a_message_need_not_wait_for_ever() -> None:
    assert run_workers(2, impatient) == [0.0, 3.0]


def halves() -> None:
    """Let a receive time out in the middle of its message, while another one is posted behind it.

    The store orders the steps of the two ranks, so that no step depends on the machine's speed.
    """
    rank, _ = enter()
    store, x = dist.distributed_c10d._get_default_store(), torch.ones(4 << 20)
    if rank == 0:
        work = dist.isend(x, 1)  # its first cells fill the ring
        assert work is not None
        p2p = dist.group.WORLD._p2p  # type: ignore[union-attr]
        with p2p._lock:  # so that the other cells do not follow
            store.set("held", "")
            store.wait(["timed out"])
            for _ in range(100):
                p2p._queues.progress()
                time.sleep(0.005)
        with pytest.raises((PeerLost, ExchangeTimeout), match="rank 1 gave up"):
            work.wait()
        return
    store.wait(["held"])
    work = dist.irecv(x, 0)
    later = dist.irecv(torch.zeros(4 << 20), 0)
    assert isinstance(work, P2PWork)
    assert later is not None
    work.end = time.monotonic()  # only the first one has timed out
    with pytest.raises(ExchangeTimeout, match="not done within 60 s"):
        work.wait()
    store.set("timed out", "")
    with pytest.raises(ExchangeTimeout, match="not done within 60 s"):
        later.wait()  # else it would be given what is left of the first message
    with pytest.raises(PeerLost, match="failed before: receive"):
        dist.recv(x, 0)


def test_half_a_message_is_never_taken_for_another() -> None:
    run_workers(2, halves, env={"SHOAL_SHM_DIRECT_MB": "inf"})


def be_held_up(store: dist.Store) -> None:
    """Look after other ranks only when rank 0 has left: as if the system gave it the core."""
    check = Barrier.check

    def held_up(barrier: Barrier, *args: Any) -> None:
        if barrier.headers.status(0) == PRESENT:  # it also keeps the store
            store.set("looking", "")
        while barrier.headers.status(0) == PRESENT:
            time.sleep(0.01)
        check(barrier, *args)

    Barrier.check = held_up  # type: ignore[method-assign]


def last_word() -> float:
    rank, _ = enter()
    store, x = dist.distributed_c10d._get_default_store(), torch.ones(3)
    if rank == 0:
        store.wait(["looking"])
        dist.send(x, 1)
        dist.destroy_process_group()
    else:
        be_held_up(store)
        dist.recv(x.zero_(), 0)
    return float(x.sum())


def test_what_was_sent_just_before_its_sender_left_arrives() -> None:
    assert run_workers(2, last_word) == [3.0, 3.0]


def who_is_left() -> float:
    rank, _ = enter()
    store, x = dist.distributed_c10d._get_default_store(), torch.ones(3)
    if rank == 1:
        be_held_up(store)
        assert dist.recv(x.zero_()) == 2
        return float(x.sum())
    store.wait(["looking"])
    if rank == 2:
        time.sleep(0.5)
        dist.send(x, 1)
    return float(x.sum())


def test_what_anyone_may_send_is_awaited_while_one_is_left() -> None:
    assert run_workers(3, who_is_left) == [3.0] * 3
