"""The parts of the backend that need no second process."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.errors import BadArgument, LayoutMismatch, PeerLost, UsageError
from shoal.wire.shm.backend.tensors import flatten, restore
from shoal.wire.shm.memory import futex, segment
from shoal.wire.shm.memory.barrier import Barrier, RankHeaders, op_signature
from shoal.wire.shm.memory.buffers import Slots
from shoal.wire.shm.memory.cma import CmaReader
from shoal.wire.shm.memory.peers import Peer, host_key, this_process
from shoal.wire.shm.memory.reduce_ops import reduction
from shoal.wire.shm.memory.segment import create, map_from
from shoal.wire.shm.node.collectives import NodeCollectives
from shoal.wire.shm.options import SEGMENT_MB, segment_limit_nbytes
from shoal.wire.shm.rendezvous import SegmentLayout, segment_layout
from shoal.wire.shm.work import Work, WorkQueue


def test_a_word_that_changes_wakes_who_sleeps_on_it() -> None:
    offer = create(4096)
    shared = offer.map()
    other = map_from(offer.path, offer.nbytes)
    offer.close()
    words, woken = shared.words(), threading.Event()

    def sleeper() -> None:
        limit = futex.timespec(10)
        while words[0] == 0:
            futex.sleep(shared.address, 0, limit)
        woken.set()

    thread = threading.Thread(target=sleeper)
    thread.start()
    other.words()[0] = 1
    while not woken.is_set():
        futex.wake(other.address)
    thread.join()
    futex.sleep(shared.address, 0, futex.timespec(100))  # it is not 0: returns at once


def test_a_segment_is_found_while_offered_and_has_no_name_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for anonymous in (True, False):
        if not anonymous:
            monkeypatch.delattr(os, "memfd_create")
        offer = create(100)
        assert offer.nbytes >= 100
        if not anonymous:
            assert Path(offer.path).stat().st_mode & 0o777 == 0o600
        offer.map().words()[3] = 7
        assert map_from(offer.path, offer.nbytes).words()[3] == 7
        offer.close()
        with pytest.raises(OSError, match=r"."):
            map_from(offer.path, offer.nbytes)


def test_without_room_a_segment_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UsageError, match="SHOAL_SHM_MB"):
        create(1 << 60)
    monkeypatch.setattr(segment, "_SHARED", str(tmp_path / "absent"))
    create(100).close()
    assert "is a file in" in caplog.text


def test_the_dead_and_the_replaced_do_not_live() -> None:
    me = this_process()
    assert me.alive
    assert me.condition == "running"
    assert not Peer(me.pid, me.started + 1).alive
    child = os.fork()
    if child == 0:
        os._exit(0)
    peer = Peer(child, 0)
    while peer.condition != "dead":
        time.sleep(0.001)
    assert not peer.alive  # though not yet reaped
    os.waitpid(child, 0)
    assert not peer.alive


def test_hosts_are_told_apart_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    here = host_key()
    assert here == host_key()
    monkeypatch.setenv("SHOAL_HOST_KEY", "elsewhere")
    assert host_key() != here


def test_a_layout_fits_its_limit_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = segment_layout(4, 256 << 20)
    assert roomy.nbytes <= 256 << 20
    assert segment_layout(4, 3 << 20).nbytes <= 3 << 20
    assert segment_layout(64, 256 << 20).nbytes <= 256 << 20
    assert roomy.ring(3, 3) < roomy.nbytes
    assert SegmentLayout(1, 64, 64).slots >= 1024
    with pytest.raises(BadArgument, match=SEGMENT_MB):
        segment_layout(64, 1 << 20)
    for wrong in ("0", "-1", "many", "inf"):
        monkeypatch.setenv(SEGMENT_MB, wrong)
        with pytest.raises(BadArgument, match=SEGMENT_MB):
            segment_limit_nbytes()


DTYPES = torch.float32, torch.bfloat16, torch.float8_e5m2


def alone() -> Barrier:
    """Where a group of one meets."""
    mapped = (offer := create(4096)).map()
    offer.close()
    return Barrier(RankHeaders(mapped, 0, peers=[this_process()], names=[0]), 5)


def test_flat_forms_share_memory_where_they_can() -> None:
    plain = torch.zeros(3, 4, requires_grad=True)
    flat = flatten(plain, "x")
    assert flat.data_ptr() == plain.data_ptr()
    assert not flat.requires_grad
    strided = torch.zeros(4, 3).t()
    copy = flatten(strided, "x")
    copy += 1
    restore(strided, copy)
    assert strided.eq(1).all()


def test_a_long_reduction_in_blocks_is_the_same_as_in_one() -> None:
    how = reduction(hash(dist.ReduceOp.SUM), torch.float32)
    xs = [torch.randn(100_001) for _ in range(3)]
    whole, blocks = torch.empty(100_001), torch.empty(100_001)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        how(whole, xs)
        torch.set_num_threads(2)
        how(blocks, xs)
    finally:
        torch.set_num_threads(threads)
    assert whole.equal(blocks)
    assert whole.equal(xs[0] + xs[1] + xs[2])


def test_torch_hashes_an_operation_to_the_number_of_its_kind() -> None:
    for name, kind in dist.ReduceOp.RedOpType.__members__.items():
        assert hash(kind) == int(kind), name
        if name != "PREMUL_SUM":  # which torch makes in a way of its own
            assert hash(dist.ReduceOp(kind)) == int(kind), name
    with pytest.raises(BadArgument, match="PREMUL_SUM"):
        reduction(hash(dist.ReduceOp.PREMUL_SUM), torch.float32)


def test_a_work_queue_keeps_order_and_hands_on_what_tasks_raise() -> None:
    seen: list[int] = []
    barrier = alone()
    queue = WorkQueue(barrier)
    gate = threading.Event()
    first = queue.run(lambda: (gate.wait(10), seen.append(0))[1], [], background=True)
    second = queue.run(lambda: seen.append(1 // 0), [], background=True)
    assert not first.is_completed()
    gate.set()
    with pytest.raises(PeerLost, match=r"failed before: .*division"):
        queue.run(lambda: seen.append(2), [], background=False)
    assert seen == [0]
    with pytest.raises(ZeroDivisionError):
        second.wait()
    assert isinstance(second.exception(), ZeroDivisionError)
    assert barrier.headers.reason(0) == str(second.exception())
    queue.stop()


def test_a_mismatch_does_not_break_what_comes_after() -> None:
    queue = WorkQueue(alone())

    def mismatch() -> None:
        raise LayoutMismatch("ranks called different collectives")

    with pytest.raises(LayoutMismatch):
        queue.run(mismatch, [], background=False)
    assert queue.run(lambda: None, [], background=False).is_success()
    queue.stop()


def test_a_prepared_reduction_does_the_same_again() -> None:
    sizes = (0, 1, 40_000)  # the last in two blocks where torch has two threads
    threads = torch.get_num_threads()
    for op, dtype, numel in itertools.product(("SUM", "AVG", "MAX"), DTYPES, sizes):
        how = reduction(hash(getattr(dist.ReduceOp, op)), dtype)
        sources = [torch.randn(numel).to(dtype) for _ in range(3)]
        wanted, out = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
        how(wanted, sources)
        try:
            torch.set_num_threads(2)
            again = how.prepare(out, sources)
        finally:
            torch.set_num_threads(threads)
        for _ in range(2):
            out.zero_()
            again()
            assert out.view(torch.uint8).equal(wanted.view(torch.uint8)), how.name


def test_a_prepared_message_is_not_kept_alive() -> None:
    mapped = (offer := create(1 << 20)).map()
    offer.close()
    barrier = alone()
    slots = Slots(mapped, 4096, nbytes=64 << 10, rank=0, size=1)
    node = NodeCollectives(barrier, slots, CmaReader(barrier))
    how = reduction(hash(dist.ReduceOp.SUM), torch.float32)
    tensor = torch.arange(40_000, dtype=torch.float32)  # three rounds of a slot
    gone = weakref.ref(tensor.untyped_storage())
    for _ in range(4):  # more often than there are slots
        node.all_reduce(op_signature("sum of 40000"), tensor, how)
        node.all_reduce(op_signature("sum of 10"), tensor[:10], how)
    assert tensor.equal(torch.arange(40_000, dtype=torch.float32))
    assert gone() is not None
    del tensor
    assert gone() is None


def test_a_future_is_settled_once_whoever_comes_first() -> None:
    x = torch.ones(1)
    early, late = Work([x]), Work([x])
    future = early.get_future()
    early.finish()
    late.finish()
    assert future.wait()[0] is x
    assert late.get_future().wait()[0] is x
    failed = Work([x])
    failed.finish(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        failed.get_future().wait()
