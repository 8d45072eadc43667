"""Tensors in shared memory are combined in place, to the bit as others are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from shm_worlds import enter, gloo

from shoal.errors import LayoutMismatch
from shoal.testing.processes import run_workers
from shoal.wire.shm import allocate

pytestmark = pytest.mark.gloo
N = 300_007


def in_place() -> None:
    rank, size = enter()
    shared = allocate(N, torch.float32)
    assert shared.shape == (N,)
    assert not shared.any()
    for start, stop in ((0, N), (5, 70_000), (N - 1, N), (7, 7)):
        plain = torch.randn(N, generator=torch.Generator().manual_seed(rank))
        shared.copy_(plain)
        dist.all_reduce(shared[start:stop])
        dist.all_reduce(plain[start:stop])
        assert shared.equal(plain)
    mean = allocate(10, torch.bfloat16)
    dist.all_reduce(mean.fill_(rank), dist.ReduceOp.AVG)
    assert mean.eq((size - 1) / 2).all()
    works = [dist.all_reduce(part, async_op=True) for part in shared.fill_(1).split(50_000)]
    for work in works:
        work.wait()
    assert shared.eq(size).all()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_shared_tensor_is_combined_as_any_other(ranks: int) -> None:
    run_workers(ranks, in_place)


def elsewhere() -> None:
    rank, _ = enter()
    assert allocate(4, torch.int64, gloo()).eq(0).all()  # an ordinary tensor
    shared = allocate(4, torch.float32)
    with pytest.raises(LayoutMismatch, match="in place"):
        dist.all_reduce(shared if rank else torch.zeros(4))


def test_other_groups_get_ordinary_tensors_and_half_shared_is_an_error() -> None:
    run_workers(2, elsewhere)
