"""Prices walk the rounds; where a textbook has a formula, they agree with it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.analysis.links import Link, Piece
from shoal.analysis.price import all_reduce_seconds, price
from shoal.axes.collectives import MEMBERS, Copy, native, ring
from shoal.errors import BadArgument
from shoal.testing.contracts import make, samples

LINK = Link(alpha=2.0**-17, beta=2.0**-30)  # powers of two: sums of them are exact
SAMPLES = {text: make(text) for member in MEMBERS for text in samples(member)}


def textbook_ring(world: int, nbytes: float, link: Link) -> float:
    return 2 * (world - 1) / world * link.beta * nbytes + 2 * (world - 1) * link.alpha


@pytest.mark.parametrize("world", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("nbytes", [0, 2**10, 2**28])
def test_ring_costs_exactly_what_the_textbook_says(world: int, nbytes: int) -> None:
    seconds = all_reduce_seconds(ring(), world, nbytes=nbytes, link=LINK)
    assert seconds == textbook_ring(world, nbytes, LINK)


@given(
    world=st.integers(1, 40),
    nbytes=st.floats(0, 1e10),
    alpha=st.floats(0, 1),
    beta=st.floats(0, 1),
)
def test_ring_costs_what_the_textbook_says_for_any_link(
    world: int, nbytes: float, alpha: float, beta: float
) -> None:
    link = Link(alpha, beta)
    seconds = all_reduce_seconds(ring(), world, nbytes=nbytes, link=link)
    assert seconds == pytest.approx(textbook_ring(world, nbytes, link), rel=1e-12)


def test_two_messages_of_one_rank_in_one_round_go_one_after_the_other() -> None:
    one = LINK.cost(1024)
    assert price([(Copy(0, 1, 0, True), Copy(0, 2, 0, True))], 1024, LINK) == 2 * one
    assert price([(Copy(1, 0, 0, True), Copy(2, 0, 0, True))], 1024, LINK) == 2 * one
    assert price([(Copy(0, 1, 0, True), Copy(2, 3, 0, True))], 1024, LINK) == one


def test_sending_and_receiving_go_at_once() -> None:
    assert price([(Copy(0, 1, 0, True), Copy(1, 0, 0, True))], 1024, LINK) == LINK.cost(1024)


def test_chunks_for_one_peer_are_one_message() -> None:
    both = [(Copy(0, 1, 0, True), Copy(0, 1, 1, True))]
    assert price(both, 1024, LINK) == LINK.cost(1024)
    assert price(both, 1024, LINK, chunks=4) == LINK.cost(512)


def test_no_rounds_cost_nothing() -> None:
    assert price([], 1024, LINK) == 0


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 12])
def test_native_is_taken_to_be_rabenseifners(world: int) -> None:
    expected = (
        2 * math.ceil(math.log2(world)) * LINK.alpha + 2 * (world - 1) / world * LINK.beta * 2**20
    )
    assert all_reduce_seconds(native(), world, nbytes=2**20, link=LINK) == pytest.approx(expected)


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_no_route_undercuts_the_bandwidth_bound(text: str, world: int) -> None:
    route = SAMPLES[text]
    if not route.refusal(world):
        bound = 2 * (world - 1) / world * LINK.beta * 2**20
        assert all_reduce_seconds(route, world, nbytes=2**20, link=LINK) >= bound


def test_a_knee_counts_by_the_size_of_the_chunk_that_travels() -> None:
    knee = Link(1.0, 0.0, (Piece(100, 50.0, 0.0),))
    assert all_reduce_seconds(ring(), 4, nbytes=200, link=knee) == 6
    assert all_reduce_seconds(ring(), 4, nbytes=400, link=knee) == 300


def test_a_world_of_nobody_is_refused() -> None:
    with pytest.raises(BadArgument, match="world=0"):
        all_reduce_seconds(ring(), 0, nbytes=1, link=LINK)
