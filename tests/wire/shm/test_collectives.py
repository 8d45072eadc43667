"""What each collective promises, beyond what gloo can be asked."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shm_worlds import enter

from shoal.errors import BadArgument, ExchangeTimeout, LayoutMismatch, PeerLost, UsageError
from shoal.testing.processes import run_workers

pytestmark = pytest.mark.gloo

EVERY_TYPE = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


def ones(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(5).to(dtype)


def every_type() -> dict[str, bool]:
    rank, size = enter()
    found = {}
    for dtype in EVERY_TYPE:
        moved = ones(dtype) if rank == 0 else torch.zeros(5).to(dtype)
        dist.broadcast(moved, 0)
        parts = [torch.zeros(5).to(dtype) for _ in range(size)]
        dist.all_gather(parts, ones(dtype))
        total = ones(dtype)
        if dtype not in (torch.uint16, torch.uint32, torch.uint64):  # torch cannot add these
            dist.all_reduce(total)
            expected = 1 if dtype == torch.bool else size
            assert total.to(torch.complex128).tolist() == [expected] * 5, dtype
        same = [p.view(torch.uint8).equal(ones(dtype).view(torch.uint8)) for p in (moved, *parts)]
        found[str(dtype)] = all(same)
    return found


def test_every_type_travels_whole() -> None:
    for found in run_workers(2, every_type):
        assert found == dict.fromkeys(found, True)


def odd_shapes() -> None:
    rank, size = enter()
    wide = torch.arange(24.0).view(4, 6).t()  # not contiguous
    dist.all_reduce(wide)
    assert wide.equal(size * torch.arange(24.0).view(4, 6).t())
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar, dist.ReduceOp.MAX)
    assert scalar.item() == size - 1
    every_other = torch.zeros(10)[::2]
    dist.broadcast(every_other.add_(rank), 1)
    assert every_other.eq(1).all()
    leaf = torch.zeros(3, requires_grad=True)
    dist.broadcast(leaf, 0)
    dist.all_reduce(leaf)
    negative = torch.zeros(4, dtype=torch.complex64).conj().imag
    dist.all_reduce(negative)
    empty = torch.zeros(0, 3)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)


def test_strided_scalar_empty_and_negated_tensors_work() -> None:
    run_workers(3, odd_shapes)


def order() -> list[Any]:
    rank, _ = enter()
    results = []
    for _ in range(2):
        x = torch.randn(50_001, generator=torch.Generator().manual_seed(rank)) * 10 ** (3 * rank)
        dist.all_reduce(x)
        results.append(x.view(torch.int32).sum().item())
    first = [torch.randn(50_001, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    a, b, c, d = (x * 10 ** (3 * r) for r, x in enumerate(first))
    results.append((((a + b) + c) + d).view(torch.int32).sum().item())
    return results


def test_sums_are_equal_bit_for_bit_and_in_the_order_of_ranks() -> None:
    every = [number for rank in run_workers(4, order) for number in rank]
    assert len(set(every)) == 1


def small_segment() -> None:
    rank, size = enter()
    assert dist.group.WORLD._collectives.slots.nbytes < 1 << 20
    x = torch.full((1_000_003,), float(rank + 1))
    dist.all_reduce(x)
    assert x.eq(sum(range(1, size + 1))).all()
    y = torch.empty(1_000_003 * size)
    dist.all_to_all_single(y, x.repeat(size))
    assert y.eq(x[0]).all()


def test_messages_larger_than_the_segment_pass_through_it() -> None:
    run_workers(3, small_segment, env={"SHOAL_SHM_MB": "1.5"})


def x4() -> torch.Tensor:
    return torch.zeros(4)


def mismatches() -> list[str]:
    rank, _ = enter()
    told = []
    for wrong in (
        lambda: dist.all_reduce(torch.zeros(3 + rank)),
        lambda: dist.all_reduce(torch.zeros(3, dtype=(torch.float32, torch.float64)[rank])),
        lambda: dist.barrier() if rank else dist.broadcast(torch.zeros(2), 0),
        lambda: dist.broadcast(torch.zeros(2), rank),
        lambda: dist.all_reduce(torch.zeros(2), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank]),
        lambda: dist.all_to_all_single(
            torch.zeros(4), torch.zeros(4), [2, 2], [1 + rank, 3 - rank]
        ),
    ):
        with pytest.raises(LayoutMismatch) as caught:
            wrong()
        told.append(str(caught.value))
        x = torch.ones(4)
        dist.all_reduce(x)  # the group goes on
        assert x.eq(2).all()
    return told


def test_ranks_that_call_different_things_are_told_both_sides_and_go_on() -> None:
    first, second = run_workers(2, mismatches)
    assert first == second
    assert "all_reduce (sum) of float32 x 3 on rank 0" in first[0]
    assert "all_reduce (sum) of float32 x 4 on rank 1" in first[0]
    assert "float64" in first[1]
    assert "barrier on rank 1" in first[2]
    assert "rank 0 sends 4 bytes to rank 0, which expects 8" in first[5]


def again() -> None:
    rank, size = enter()
    total = sum(range(1, size + 1))
    tensors = [torch.zeros(numel) for numel in (1, 70_000, 700_000)]  # short, a round, several
    for time in range(5):  # more often than there are slots
        for x in (*tensors, tensors[2][:70_000], tensors[2][5:]):
            x.fill_((rank + 1) * (time + 1))
            dist.all_reduce(x)
            assert x.eq(total * (time + 1)).all(), (time, x.numel())
            dist.all_reduce(x, dist.ReduceOp.MAX)
            assert x.eq(total * (time + 1)).all()
    many = [torch.full((1,), rank + 1.0) for _ in range(1500)]  # more than are kept
    for x in (*many, *many):
        dist.all_reduce(x)
    assert all(x.item() == total * size for x in many)


@pytest.mark.parametrize("size", [2, 3])
def test_a_tensor_reduced_again_gives_what_it_holds_then(size: int) -> None:
    run_workers(size, again)


def without_grad() -> None:
    rank, size = enter()
    x = torch.full((9,), rank + 1.0)
    with torch.inference_mode():
        for _ in range(4):
            dist.all_reduce(x.fill_(rank + 1.0))
    for _ in range(4):
        dist.all_reduce(x.fill_(rank + 1.0))
        assert x.eq(sum(range(1, size + 1))).all()


def test_what_was_reduced_in_inference_mode_can_be_reduced_after_it() -> None:
    run_workers(2, without_grad)


def dropped() -> None:
    rank, _ = enter()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    if rank == 0:
        with pytest.raises(ExchangeTimeout):
            dist.all_reduce(torch.zeros(3), group=group)  # the other does not come
        with pytest.raises(PeerLost, match="failed before"):
            dist.all_reduce(torch.zeros(3), group=group)
        held = weakref.ref(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert held() is None
    dist.barrier()


def test_a_group_that_failed_is_let_go() -> None:
    run_workers(2, dropped)


def bad_arguments() -> None:
    enter()
    with pytest.raises(BadArgument, match="dense CPU tensors"):
        dist.all_reduce(torch.zeros(3, device="meta"))
    with pytest.raises(BadArgument, match="mean of integers"):
        dist.all_reduce(torch.zeros(3, dtype=torch.int64), dist.ReduceOp.AVG)
    with pytest.raises(BadArgument, match="integers and bool"):
        dist.all_reduce(torch.zeros(3), dist.ReduceOp.BOR)
    with pytest.raises(BadArgument, match="reduce op PREMUL_SUM"):
        dist.all_reduce(torch.zeros(3), dist._make_nccl_premul_sum(2.0))
    with pytest.raises(BadArgument, match="together all rows"):
        dist.all_to_all_single(torch.zeros(4), torch.zeros(5))
    dist.barrier()
    world = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(UsageError, match="destroyed"):
        world.allreduce([torch.zeros(1)])


def test_what_cannot_be_done_is_refused_before_anything_moves() -> None:
    run_workers(2, bad_arguments)


def later() -> None:
    rank, size = enter()
    tensors = [torch.full((300_000,), float(i)) for i in range(6)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    fresh = torch.full((4,), float(rank))
    dist.all_reduce(fresh)  # waits for its turn
    assert all(work.is_completed() for work in works)
    assert all(x.eq(i * size).all() for i, x in enumerate(tensors))
    assert works[0].get_future().wait()[0] is tensors[0]
    assert works[0].is_success()
    assert works[0].exception() is None
    chained = dist.all_reduce(fresh, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    assert chained.wait().eq(2 * fresh).all()


def test_asynchronous_work_is_done_in_order_in_the_background() -> None:
    run_workers(2, later)


def coalesced() -> None:
    rank, size = enter()
    world = dist.group.WORLD
    xs = [torch.full((n,), float(rank)) for n in (3, 5)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    assert all(x.eq(sum(range(size))).all() for x in xs)
    outs = [torch.empty(size * 2), torch.empty(size * 3)]
    ins = [torch.full((2,), float(rank)), torch.full((3,), float(rank))]
    world.allgather_into_tensor_coalesced(outs, ins).wait()
    assert outs[1].view(size, 3)[:, 0].tolist() == list(range(size))
    parts = [torch.empty(2), torch.empty(3)]
    world.reduce_scatter_tensor_coalesced(parts, outs, dist.ReduceScatterOptions()).wait()
    assert parts[0].eq(size * rank).all()
    dist.group.WORLD.monitored_barrier()


def test_coalesced_forms_do_what_the_single_ones_do() -> None:
    run_workers(3, coalesced)


def objects() -> list[Any]:
    rank, size = enter()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    told = [rank * 10]
    dist.broadcast_object_list(told, 1)
    return [found, told]


def test_torchs_object_collectives_work() -> None:
    assert run_workers(2, objects) == [[[{"rank": 0}, {"rank": 1}], [10]]] * 2


def in_callbacks() -> None:
    rank, size = enter(20)
    a, b, c, d = (torch.full((100,), rank + 1.0) for _ in range(4))
    total = size * (size + 1) / 2

    def awaits(_: object) -> torch.Tensor:
        dist.all_reduce(b)  # at once, behind what is queued
        work = dist.all_reduce(c, async_op=True)
        assert work is not None
        return work.get_future().wait()[0]

    first, last = dist.all_reduce(a, async_op=True), dist.all_reduce(d, async_op=True)
    assert first is not None
    assert last is not None
    found = first.get_future().then(awaits).wait()
    last.wait()
    assert all(x.eq(total).all() for x in (a, b, c, d, found))


@pytest.mark.parametrize("size", [2, 3])
def test_a_callback_may_wait_for_other_collectives(size: int) -> None:
    run_workers(size, in_callbacks, seconds=60)


def unsigned_and_overlapping() -> None:
    rank, size = enter(20)
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        x = torch.tensor([rank + 1, 3]).to(dtype)
        dist.all_reduce(x)
        assert x.tolist() == [size * (size + 1) // 2, 3 * size]
        with pytest.raises(BadArgument, match="cannot order"):
            dist.all_reduce(x, dist.ReduceOp.MAX)
    spread = torch.ones(1).expand(4)
    with pytest.raises(BadArgument, match="share memory"):
        dist.all_reduce(spread)
    with pytest.raises(BadArgument, match="share memory"):
        dist.all_gather_into_tensor(torch.ones(1).expand(4 * size), torch.ones(4))
    dist.all_reduce(y := torch.ones(2))
    assert y.eq(size).all()  # the group goes on


def test_unsigned_numbers_are_summed_and_shared_memory_is_refused_before_anything_moves() -> None:
    run_workers(2, unsigned_and_overlapping, seconds=60)
