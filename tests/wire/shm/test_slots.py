"""Two slots are enough: nobody writes over what another still reads, however late that one is."""

from __future__ import annotations

import ctypes
import random
import time

import pytest
import torch
import torch.distributed as dist
from shm_worlds import enter
from torch import Tensor

from shoal.errors import LayoutMismatch
from shoal.testing.processes import run_workers
from shoal.wire.shm.memory import buffers as slots
from shoal.wire.shm.memory.reduce_ops import Reduction
from shoal.wire.shm.node import reduce as prepared
from shoal.wire.shm.node.collectives import copy_if_overlapping

KINDS = "reduce", "reduce_scatter", "gather", "scatter", "broadcast", "all_gather", "all_to_all"


class Dawdler:
    """Copies as ``memmove`` does; while ``late``, with a pause before and in the middle."""

    late = False

    def __call__(self, to: int, source: int, nbytes: int) -> None:
        half = nbytes // 2
        for begin, end in ((0, half), (half, nbytes)):
            if self.late:
                time.sleep(0.002)
            ctypes.memmove(to + begin, source + begin, end - begin)

    def combining(self, combine: Reduction) -> Reduction:
        """The same for a reduction."""

        def slowly(first: Tensor, second: Tensor, *, out: Tensor) -> Tensor:
            if self.late:
                time.sleep(0.002)
            return combine.combine(first, second, out=out)

        return combine._replace(combine=slowly)


def numbers(rank: int, numel: int) -> Tensor:
    return torch.arange(numel, dtype=torch.int64) * (rank + 1)


def call(kind: str, numel: int, root: int) -> bool:
    """Call a collective; whether its result is right here."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, out, everyone = numbers(rank, numel), numbers(rank, numel), range(size)
    outs, total = [torch.zeros_like(x) for _ in everyone], size * (size + 1) // 2 - 1
    if kind in ("all_reduce", "reduce", "broadcast"):
        getattr(dist, kind)(*(x,) if kind == "all_reduce" else (x, root))
        of = root if kind == "broadcast" else total
        return x.equal(numbers(of, numel)) or (kind == "reduce" and rank != root)
    if kind == "reduce_scatter":
        dist.reduce_scatter(out, [x] * size)
        return out.equal(numbers(total, numel))
    if kind == "scatter":
        dist.scatter(out, [numbers(r, numel) for r in everyone] if rank == root else None, root)
        return out.equal(numbers(rank, numel))
    if kind == "gather":
        dist.gather(x, outs if rank == root else None, root)
    elif kind == "all_gather":
        dist.all_gather(outs, x)
    else:
        dist.all_to_all(outs, [x] * size)
    right = all(out.equal(numbers(r, numel)) for r, out in enumerate(outs))
    return right or (kind == "gather" and rank != root)


def late(seed: int) -> None:
    rank, size = enter()
    copy = prepared.memmove = slots.memmove = Dawdler()  # type: ignore[assignment, attr-defined]
    prepare, combine = Reduction.prepare, Reduction.__call__
    Reduction.prepare = lambda self, *args: prepare(copy.combining(self), *args)  # type: ignore[method-assign]
    Reduction.__call__ = lambda self, *args: combine(copy.combining(self), *args)  # type: ignore[method-assign]
    room = dist.group.WORLD._collectives.slots.round_nbytes // 8  # type: ignore[union-attr]
    draw = random.Random(seed)  # the same on every rank
    for turn, kind in enumerate(draw.sample(KINDS, len(KINDS)) * 2):
        copy.late = turn % size == rank
        for each in ("all_reduce", kind):  # long enough for a last round of half the length
            numel = draw.choice((100, room, 7 * room // 2, 7 * room // 2, 9 * room // 2 + 3))
            assert call(each, numel, turn % size), (each, numel, turn)
        with pytest.raises(LayoutMismatch):
            dist.all_reduce(torch.zeros(room if rank else 4 * room))


@pytest.mark.gloo
@pytest.mark.parametrize("size", [2, 3, 4])
def test_late_ranks_still_find_what_was_written_for_them(size: int) -> None:
    env = {"SHOAL_SHM_MB": "0.5", "SHOAL_SHM_DIRECT_MB": "inf"}
    run_workers(size, late, size, env=env)


def test_sources_are_copied_only_where_a_target_lies_over_one() -> None:
    x = torch.arange(40, dtype=torch.uint8)
    at = x.data_ptr()
    shared, far = [(at, 10), (at, 10), (at + 5, 10)], [(at + 20, 10), (at + 30, 10)]
    assert copy_if_overlapping(shared, far) == (None, shared)
    assert copy_if_overlapping([(at, 0)], [(at, 10)]) == (None, [(at, 0)])
    for target in ((at + 14, 3), (at, 1), (at + 2, 5), (at, 40)):
        copies, sources = copy_if_overlapping(shared, [*far, target])
        assert copies is not None
        assert copies.tolist() == [*range(10), *range(10), *range(5, 15)]
        assert sources == [(copies.data_ptr() + begin, 10) for begin in (0, 10, 20)]
