"""A proof that cannot fail proves nothing: wrong routes are found, and told where."""

from __future__ import annotations

import pytest

from shoal.axes.collectives import Collective, Copy, Round, prove, ring
from shoal.errors import BadArgument


def route(*rounds: Round, chunks: int = 1) -> Collective:
    return Collective("mine", rounds=lambda world: rounds, chunks=lambda world: chunks)


SWAP = (Copy(0, 1, 0, True), Copy(1, 0, 0, True))


def test_copies_of_a_round_read_what_was_held_before_it() -> None:
    prove(route(SWAP), 2)


def test_a_part_that_never_arrives_is_named() -> None:
    with pytest.raises(
        BadArgument, match=r"rank 0 chunk 0 \(never written\) lacks the contribution of rank 1"
    ):
        prove(route((Copy(1, 0, 1, True), Copy(0, 1, 1, True)), chunks=2), 2)


def test_a_part_that_is_counted_twice_is_named_with_its_round() -> None:
    twice = r"rank 0 chunk 0 \(last written in round 1\) has the contribution of rank 0, 1 more"
    with pytest.raises(BadArgument, match=twice):
        prove(route(SWAP, SWAP), 2)


@pytest.mark.parametrize("left_out", range(4))
def test_a_ring_short_of_any_one_round_is_refused(left_out: int) -> None:
    rounds = ring().rounds
    assert rounds is not None
    short = [copies for number, copies in enumerate(rounds(3)) if number != left_out]
    with pytest.raises(BadArgument, match="rank"):
        prove(route(*short, chunks=3), 3)


@pytest.mark.parametrize(
    "copy", [Copy(0, 2, 0, True), Copy(-1, 0, 0, True), Copy(0, 1, 1, True), Copy(0, 1, -1, True)]
)
def test_a_copy_from_or_to_nowhere_is_named_with_its_round(copy: Copy) -> None:
    with pytest.raises(BadArgument, match=r"round 1: Copy.*outside 2 ranks and 1 chunks"):
        prove(route(SWAP, (copy,)), 2)


def test_a_copy_to_oneself_is_refused() -> None:
    with pytest.raises(BadArgument, match="itself"):
        prove(route((Copy(1, 1, 0, True),)), 2)


def test_two_copies_of_which_only_the_order_would_decide_are_refused() -> None:
    with pytest.raises(BadArgument, match="write rank 2 chunk 0 at the same time"):
        prove(route((Copy(0, 2, 0, False), Copy(1, 2, 0, True))), 3)


def test_several_may_add_to_one_at_once() -> None:
    star = (Copy(1, 0, 0, True), Copy(2, 0, 0, True))
    back = (Copy(0, 1, 0, False), Copy(0, 2, 0, False))
    prove(route(star, back), 3)
