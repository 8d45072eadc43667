"""Two halves of an all-reduce make a whole one, for any length and number of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shoal.axes.collectives import ring
from shoal.testing.processes import run_workers
from shoal.wire.route import TwoStepAllReduce

pytestmark = pytest.mark.gloo
LENGTHS = (0, 1, 2, 3, 7, 64)


def halves() -> list[tuple[torch.Tensor, torch.Tensor]]:
    dist.init_process_group("gloo")
    rounds = ring().rounds
    assert rounds is not None
    rank, made = dist.get_rank(), TwoStepAllReduce(None, list(rounds(dist.get_world_size())))
    found = []
    for length in LENGTHS:
        tensor = torch.arange(length, dtype=torch.float64) + 100 * rank
        scattered = made.reduce_scatter(tensor).clone()
        found.append((scattered, made.all_gather(tensor)))
    return found


@pytest.mark.parametrize("workers", [2, 3])
def test_what_is_scattered_and_spread_is_the_sum(workers: int) -> None:
    everyone = run_workers(workers, halves)
    for index, length in enumerate(LENGTHS):
        base = torch.arange(length, dtype=torch.float64)
        total = workers * base + 100 * sum(range(workers))
        for told in everyone:
            assert torch.equal(told[index][1], total)
        found = torch.stack([(told[index][0] == total) for told in everyone])
        assert bool(found.any(0).all()), "each number is complete on some rank after the first half"
