"""Two slots are enough: nobody writes over what another still reads, however late that one is."""

from __future__ import annotations

import ctypes
import random
import time

import pytest
import torch
import torch.distributed as dist
from shm_worlds import enter

from shoal.testing.processes import run_workers
from shoal.wire.shm import prepared, slots

pytestmark = pytest.mark.gloo


class Dawdler:
    """Copies as ``memmove`` does; while ``late``, with a pause before and in the middle."""

    late = False

    def __call__(self, to: int, source: int, nbytes: int) -> None:
        half = nbytes // 2
        for begin, end in ((0, half), (half, nbytes)):
            if self.late:
                time.sleep(0.002)
            ctypes.memmove(to + begin, source + begin, end - begin)


def numbers(rank: int, numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.int64) * (rank + 1)


def late(seed: int) -> None:
    rank, size = enter()
    copy = prepared.memmove = slots.memmove = Dawdler()  # type: ignore[assignment]
    room = dist.group.WORLD._wire.slots.cached // 8  # type: ignore[union-attr]
    draw = random.Random(seed)  # the same on every rank
    for turn in range(12):
        copy.late = turn % size == rank
        numel = draw.choice((1, 100, room, 5 * room + 8, 7 * room // 2, 9 * room // 2 + 3))
        kind = draw.choice(("all_reduce", "all_reduce", "broadcast", "all_gather", "all_to_all"))
        x = numbers(rank, numel)
        if kind == "all_reduce":
            dist.all_reduce(x)
            assert x.equal(numbers(size * (size + 1) // 2 - 1, numel)), (kind, numel)
        elif kind == "broadcast":
            dist.broadcast(x, numel % size)
            assert x.equal(numbers(numel % size, numel)), (kind, numel)
        else:
            outs = [torch.zeros_like(x) for _ in range(size)]
            if kind == "all_gather":
                dist.all_gather(outs, x)
            else:
                dist.all_to_all(outs, [x] * size)
            for other, out in enumerate(outs):
                assert out.equal(numbers(other, numel)), (kind, numel)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_late_ranks_still_find_what_was_written_for_them(size: int) -> None:
    env = {"SHOAL_SHM_MB": "0.5", "SHOAL_SHM_DIRECT_MB": "inf"}
    run_workers(size, late, size, env=env)
