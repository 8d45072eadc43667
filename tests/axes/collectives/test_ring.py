"""What is particular to the ring."""

from __future__ import annotations

from collections import Counter

import pytest

from shoal.axes.collectives import Copy, Round, ring


def rounds_of(world: int) -> list[Round]:
    rounds = ring().rounds
    assert rounds is not None
    return list(rounds(world))


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_there_are_two_phases_of_world_minus_one_rounds(world: int) -> None:
    adds = [{copy.add for copy in copies} for copies in rounds_of(world)]
    assert adds == [{True}] * (world - 1) + [{False}] * (world - 1)


@pytest.mark.parametrize("world", [2, 3, 6])
def test_each_rank_sends_one_chunk_to_its_right_in_every_round(world: int) -> None:
    for copies in rounds_of(world):
        assert sorted(copy.source for copy in copies) == list(range(world))
        assert all(copy.target == (copy.source + 1) % world for copy in copies)


@pytest.mark.parametrize("world", [2, 3, 6])
def test_each_chunk_is_summed_along_one_path(world: int) -> None:
    adds = Counter(copy.chunk for copies in rounds_of(world) for copy in copies if copy.add)
    assert adds == dict.fromkeys(range(world), world - 1)


def test_two_ranks_swap_halves_then_sums() -> None:
    assert rounds_of(2) == [
        (Copy(0, 1, 0, True), Copy(1, 0, 1, True)),
        (Copy(0, 1, 1, False), Copy(1, 0, 0, False)),
    ]
