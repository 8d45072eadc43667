"""How rounds are run: groups, tags, what travels, and what is refused."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
import torch.distributed as dist

from shoal.axes.collectives import Copy, ring
from shoal.errors import BadArgument
from shoal.testing.processes import run_workers
from shoal.wire.route import RankRound, rank_rounds, run_rounds


def _ring(world: int) -> tuple[list[tuple[Copy, ...]], int]:
    route = ring()
    assert route.rounds is not None
    return list(route.rounds(world)), route.chunks(world)


def _in_a_pair_of_four() -> list[float]:
    """Ranks 1 and 3 alone: group ranks differ from global ones."""
    dist.init_process_group("gloo")
    pair = dist.new_group([1, 3])
    values = torch.full((5,), float(dist.get_rank()))
    if dist.get_rank() in (1, 3):
        rounds, chunks = _ring(2)
        run_rounds(values, rank_rounds(rounds, dist.get_rank(pair)), chunks=chunks, group=pair)
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
    run_rounds(mine, rank_rounds([swap], dist.get_rank()), chunks=2)
    return mine.tolist()


@pytest.mark.gloo
def test_what_is_sent_in_a_round_is_what_was_held_before_it() -> None:
    first, second = run_workers(2, _swap_both_chunks, seconds=60)
    assert first == [10.0, 11.0, 14.0, 16.0, 18.0]
    assert second == [0.0, 1.0, 14.0, 16.0, 18.0]


def _two_at_once() -> list[list[float]]:
    """Two threads, started in another order on every other rank, told apart by their tags."""
    dist.init_process_group("gloo")
    rounds, chunks = _ring(dist.get_world_size())
    values = [torch.full((9,), 1.0), torch.full((9,), 10.0)]
    threads = [
        Thread(
            target=run_rounds,
            args=(v, rank_rounds(rounds, dist.get_rank())),
            kwargs={"chunks": chunks, "tag": 1 + tag},
        )
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
    assert rank_rounds(rounds, 0) == (RankRound({1: [0, 2]}, {}),)
    assert rank_rounds(rounds, 1) == (
        RankRound({}, {0: [(0, True), (2, False)]}),
        RankRound({2: [0]}, {}),
    )
    assert rank_rounds(rounds, 3) == ()


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
    assert rank_rounds(rounds(1), 0) == ()
