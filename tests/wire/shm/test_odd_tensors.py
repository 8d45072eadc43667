"""Tensors that overlap, are expanded, or were made in inference mode; and calls to oneself."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from shm_worlds import enter

from shoal.errors import BadArgument
from shoal.testing.processes import outcomes, run_workers
from shoal.wire.shm.backend.process_group import allocate

pytestmark = pytest.mark.gloo


def over_anothers(numel: int) -> None:
    rank, size = enter()
    outs = [torch.full((numel,), rank + 1.0) for _ in range(size)]
    dist.all_gather(outs, outs[0])  # which is where rank 0's part goes
    assert [float(out.mean()) for out in outs] == [r + 1.0 for r in range(size)]
    parts = list(torch.arange(rank * size, (rank + 1) * size).repeat_interleave(numel).split(numel))
    dist.all_to_all(parts, parts)
    assert [int(part[-1]) for part in parts] == [r * size + rank for r in range(size)]


@pytest.mark.parametrize("numel", [5, 300_000])
def test_parts_may_go_where_ones_own_are(numel: int) -> None:
    run_workers(3, over_anothers, numel, env={"SHOAL_SHM_MB": "3"})


def in_inference_mode() -> None:
    rank, size = enter()
    total = float(sum(range(1, size + 1)))
    with torch.inference_mode():
        x = torch.full((4, 6), rank + 1.0)
        strided, mine = x.clone().t(), torch.zeros(6)
        works = [
            dist.all_reduce(strided, async_op=True),
            dist.reduce_scatter(mine, [row.clone() for row in x[:size]], async_op=True),
            dist.reduce(x, 0, async_op=True),
        ]
        received = torch.zeros(3, 2).t()
        works.append(dist.isend(torch.full((6,), 7.0), (rank + 1) % size))
        works.append(dist.irecv(received, (rank - 1) % size))
        for work in works:
            work.wait()
    assert strided.eq(total).all()
    assert mine.eq(total).all()
    assert rank or x.eq(total).all()
    assert received.eq(7).all()


def test_tensors_of_inference_mode_are_written_in_the_background() -> None:
    run_workers(2, in_inference_mode)


def kept_from_inference_mode() -> None:
    rank, size = enter()
    bucket = allocate(1000, torch.float32)
    out, parts = torch.zeros(65536), [torch.ones(65536) for _ in range(size)]
    for mode in (True, False):  # what is worked out in the first is used in the second
        with torch.inference_mode(mode):
            bucket.fill_(rank + 1.0)
            dist.all_reduce(bucket)
            dist.reduce_scatter(out, parts)
        assert bucket.eq(sum(range(1, size + 1))).all()
        assert out.eq(size).all()
    x = torch.ones(1 << 18)
    dist.all_reduce(x)  # in pieces, each where a part of the reduce_scatter was
    assert x.eq(size).all()


def test_what_inference_mode_had_made_is_used_outside_of_it() -> None:
    run_workers(4, kept_from_inference_mode)


def one_row() -> None:
    rank, _ = enter()
    x = torch.from_numpy(np.full(5, float(rank))[None])  # strides (0, 1), and nothing is shared
    assert x.stride(0) == 0
    dist.broadcast(x, 1)
    assert x.eq(1).all()
    dist.all_reduce(x)
    assert x.eq(2).all()


def test_a_row_of_numpy_is_a_tensor_like_others() -> None:
    run_workers(2, one_row)


def expanded() -> str:
    rank, _ = enter()
    row = torch.arange(3.0).expand(4, 3)
    x = row if rank == 0 else torch.zeros(4, 3)
    dist.broadcast(x, 0)
    assert x.equal(row)
    with pytest.raises(BadArgument) as caught:
        dist.broadcast(torch.zeros(1).expand(3), 1 - rank)  # each would be written to
    return str(caught.value)


def test_an_expanded_tensor_is_sent_and_not_written_to() -> None:
    assert "its elements share memory" in run_workers(2, expanded)[1]


def to_oneself() -> None:
    rank, _ = enter()
    for call in (dist.isend, dist.irecv):
        with pytest.raises(BadArgument, match=f"rank {rank}: that is this rank itself"):
            call(torch.zeros(1), rank)
    dist.barrier()


def test_a_message_to_oneself_is_refused_at_once() -> None:
    run_workers(2, to_oneself)


def too_little() -> None:
    enter(30)


@pytest.mark.parametrize("limit", ["0", "0.01"])
def test_every_rank_is_told_of_a_limit_that_will_not_do(limit: str) -> None:
    for each in outcomes(2, too_little, env={"SHOAL_SHM_MB": limit}, seconds=20):
        assert f"SHOAL_SHM_MB={limit}" in (each.error or "")
        assert "need 0.0 " not in (each.error or "")


def one_has_little() -> None:
    if os.environ["RANK"] == "1":
        os.environ["SHOAL_SHM_MB"] = "0.01"
    enter(30)


def test_a_limit_of_one_rank_that_will_not_do_is_told_on_all() -> None:
    for each in outcomes(3, one_has_little, seconds=20):
        assert "SHOAL_SHM_MB=0.01" in (each.error or "")
