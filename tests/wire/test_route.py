"""Routes as data give the sum, whatever the world and the size."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.axes.collectives import MEMBERS, Copy, ring
from shoal.errors import BadArgument
from shoal.testing.processes import run_workers
from shoal.wire.route import Leg, legs, run_rounds

SIZES = (0, 1, 2, 3, 5, 7, 64, 1001)
ROUTES = tuple(member().name for member in MEMBERS if member().rounds is not None)


def _rounds(name: str, world: int) -> tuple[list[tuple[Copy, ...]], int]:
    [route] = [member() for member in MEMBERS if member().name == name]
    assert route.rounds is not None
    return list(route.rounds(world)), route.chunks(world)


def _values(rank: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + size)
    return torch.randn(size, dtype=torch.float64, generator=generator)


def _sums(name: str) -> list[tuple[list[float], list[float]]]:
    """(by the route, by torch) for each size, one after the other with no barrier between."""
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    rounds, chunks = _rounds(name, world)
    ours = [_values(rank, size) for size in SIZES]
    theirs = [values.clone() for values in ours]
    for values in ours:
        run_rounds(values, rounds, chunks=chunks)
    for values in theirs:
        dist.all_reduce(values)
    return [(a.tolist(), b.tolist()) for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.gloo
@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_route_sums_like_torch_at_every_size_and_alike_on_every_rank(
    name: str, world: int
) -> None:
    results = run_workers(world, _sums, name, seconds=60)
    for size_results in zip(*results, strict=True):
        for ours, theirs in size_results:
            torch.testing.assert_close(
                torch.tensor(ours), torch.tensor(theirs), rtol=1e-12, atol=1e-12
            )
            assert ours == size_results[0][0], "ranks hold different bits"


def _in_a_pair_of_four() -> list[float]:
    """Ranks 1 and 3 alone: group ranks differ from global ones."""
    dist.init_process_group("gloo")
    pair = dist.new_group([1, 3])
    values = torch.full((5,), float(dist.get_rank()))
    if dist.get_rank() in (1, 3):
        rounds, chunks = _rounds("ring", 2)
        run_rounds(values, rounds, chunks=chunks, group=pair)
    return values.tolist()


@pytest.mark.gloo
def test_ranks_are_counted_within_the_group() -> None:
    assert run_workers(4, _in_a_pair_of_four, seconds=60) == [
        [0.0] * 5,
        [4.0] * 5,
        [2.0] * 5,
        [4.0] * 5,
    ]


def _swap_both_chunks() -> list[float]:
    """Two chunks in one message, each sent while it is written: the old one must travel."""
    dist.init_process_group("gloo")
    mine = torch.arange(5.0) + 10 * dist.get_rank()
    swap = [Copy(s, 1 - s, chunk, add=chunk == 1) for s in (0, 1) for chunk in (1, 0)]
    run_rounds(mine, [swap], chunks=2)
    return mine.tolist()


@pytest.mark.gloo
def test_what_is_sent_in_a_round_is_what_was_held_before_it() -> None:
    first, second = run_workers(2, _swap_both_chunks, seconds=60)
    assert first == [10.0, 11.0, 14.0, 16.0, 18.0]
    assert second == [0.0, 1.0, 14.0, 16.0, 18.0]


def _two_at_once() -> list[list[float]]:
    """Two threads, started in another order on every other rank, told apart by their tags."""
    dist.init_process_group("gloo")
    rounds, chunks = _rounds("ring", dist.get_world_size())
    values = [torch.full((9,), 1.0), torch.full((9,), 10.0)]
    threads = [
        Thread(target=run_rounds, args=(v, rounds), kwargs={"chunks": chunks, "tag": 1 + tag})
        for tag, v in enumerate(values)
    ]
    for thread in threads[:: 1 if dist.get_rank() % 2 else -1]:
        thread.start()
    for thread in threads:
        thread.join()
    return [v.tolist() for v in values]


@pytest.mark.gloo
def test_all_reduces_at_the_same_time_are_told_apart_by_tag() -> None:
    assert run_workers(3, _two_at_once, seconds=60) == [[[3.0] * 9, [30.0] * 9]] * 3


def test_legs_are_one_ranks_part_and_leave_idle_rounds_out() -> None:
    rounds = [(Copy(0, 1, 0, True), Copy(0, 1, 2, False)), (Copy(1, 2, 0, False),)]
    assert legs(rounds, 0) == (Leg({1: [0, 2]}, {}),)
    assert legs(rounds, 1) == (Leg({}, {0: [(0, True), (2, False)]}), Leg({2: [0]}, {}))
    assert legs(rounds, 3) == ()


def test_a_tensor_that_is_not_flat_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    for tensor in (torch.zeros(2, 2), torch.zeros(6)[::2]):
        with pytest.raises(BadArgument, match="flat"):
            run_rounds(tensor, [], chunks=1)
    with pytest.raises(BadArgument, match="chunk"):
        run_rounds(torch.zeros(2), [], chunks=0)


def test_a_world_of_one_sends_nothing() -> None:
    rounds = ring().rounds
    assert rounds is not None
    assert legs(rounds(1), 0) == ()
