"""Routes cost exactly what the textbook says: Ben-Nun & Hoefler 2019, Thakur et al. 2005."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from shoal.analysis.links import Link
from shoal.analysis.price import all_reduce_seconds, price
from shoal.axes.collectives import (
    Collective,
    blueconnect,
    butterfly,
    double_tree,
    fastest,
    halving_doubling,
    hierarchical,
    linear,
    ring,
    tree,
)
from shoal.axes.collectives.kit.choose import MARGIN

A, B = 2.0**-17, 2.0**-30  # powers of two: sums of them are exact
LINK = Link(alpha=A, beta=B)
SIZES = (0, 2**10, 3 * 2**20, 2**28)
POWERS = (2, 4, 8, 16)
Formula = Callable[[int, float], float]


def cost(route: Collective, world: int, nbytes: float) -> float:
    return all_reduce_seconds(route, world, nbytes=nbytes, link=LINK)


def log2(world: int) -> int:
    return round(math.log2(world))


def linear_book(p: int, m: float) -> float:
    return 2 * ((p - 1) * B * m + (p - 1) * A)  # the book's linear reduction, there and back


def tree_book(p: int, m: float) -> float:
    return 2 * math.ceil(math.log2(p)) * (A + B * m)


def doubling_book(p: int, m: float) -> float:
    return log2(p) * (A + B * m)


def ring_book(p: int, m: float) -> float:
    return 2 * (p - 1) / p * B * m + 2 * (p - 1) * A


def rabenseifner_book(p: int, m: float) -> float:
    return 2 * (p - 1) / p * B * m + 2 * log2(p) * A


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("world", POWERS)
@pytest.mark.parametrize(
    ("route", "book"),
    [
        (linear(), linear_book),
        (tree(), tree_book),
        (butterfly(), doubling_book),
        (ring(), ring_book),
        (halving_doubling(), rabenseifner_book),
    ],
    ids=lambda value: repr(value) if isinstance(value, Collective) else "",
)
def test_the_price_is_the_textbooks(
    route: Collective, book: Formula, world: int, nbytes: int
) -> None:
    assert cost(route, world, nbytes) == book(world, nbytes)


@pytest.mark.parametrize("world", range(1, 18))
def test_linear_and_tree_cost_what_the_book_says_in_any_world(world: int) -> None:
    assert cost(linear(), world, 2**20) == linear_book(world, 2**20)
    assert cost(tree(), world, 2**20) == tree_book(world, 2**20)


@pytest.mark.parametrize("world", POWERS)
def test_the_reduction_of_linear_alone_is_the_books_line(world: int) -> None:
    rounds = linear().rounds
    assert rounds is not None
    reduction = list(rounds(world))[:-1]
    assert price(reduction, 2**20, LINK) == (world - 1) * B * 2**20 + (world - 1) * A


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("world", [3, 5, 6, 7, 9, 12, 17])
def test_folding_in_costs_two_more_messages_of_the_whole(world: int, nbytes: int) -> None:
    power = 2 ** math.floor(math.log2(world))
    extra = 2 * (A + B * nbytes)
    assert cost(butterfly(), world, nbytes) == doubling_book(power, nbytes) + extra
    assert cost(halving_doubling(), world, nbytes) == rabenseifner_book(power, nbytes) + extra


@pytest.mark.parametrize("segments", [1, 4, 16])
@pytest.mark.parametrize("world", range(2, 18))
def test_a_double_tree_costs_its_rounds_of_one_segment(world: int, segments: int) -> None:
    route = double_tree(segments)
    rounds = len(list(route.rounds(world))) if route.rounds else 0
    each = A + B * 2**20 / (2 * segments)
    assert cost(route, world, 2**20) == rounds * each
    assert rounds <= 4 * (segments + math.ceil(math.log2(world)) - 1)


@pytest.mark.parametrize("world", [4, 8, 16])
def test_many_segments_of_a_double_tree_come_to_twice_the_message(world: int) -> None:
    free = Link(alpha=0.0, beta=B)
    seconds = all_reduce_seconds(double_tree(64), world, nbytes=2**20, link=free)
    assert 2 * B * 2**20 <= seconds <= 1.06 * 2 * B * 2**20


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("outer", [ring(), tree(), butterfly(), halving_doubling(), double_tree()])
@pytest.mark.parametrize(("inner", "groups"), [(2, 2), (2, 8), (4, 4), (8, 2), (4, 1)])
def test_hierarchical_is_scatter_inside_all_reduce_of_a_slice_and_gather(
    inner: int, groups: int, outer: Collective, nbytes: int
) -> None:
    inside = (inner - 1) * A + (inner - 1) / inner * B * nbytes
    expected = 2 * inside + cost(outer, groups, nbytes / inner)
    assert cost(hierarchical(inner, outer), inner * groups, nbytes) == expected


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("levels", [(2, 2), (2, 4), (4, 2, 2)])
def test_blueconnect_is_two_ring_halves_a_level_of_what_is_left(
    levels: tuple[int, ...], nbytes: int
) -> None:
    expected, left = 0.0, float(nbytes)
    for level in levels:
        expected += 2 * ((level - 1) * A + (level - 1) / level * B * left)
        left /= level
    assert cost(blueconnect(*levels), math.prod(levels), nbytes) == expected


@pytest.mark.parametrize("world", POWERS)
@pytest.mark.parametrize("route", [ring(), halving_doubling(), hierarchical(2), blueconnect(2)])
def test_these_send_the_fewest_bytes_there_can_be(route: Collective, world: int) -> None:
    free = Link(alpha=0.0, beta=B)
    least = 2 * (world - 1) / world * B * 2**20
    assert all_reduce_seconds(route, world, nbytes=2**20, link=free) == least


def test_the_fastest_costs_little_more_than_the_cheapest() -> None:
    for world in (2, 3, 4, 8):
        for nbytes in (2**10, 2**26):
            routes = (linear(), ring(), tree(), butterfly(), halving_doubling(), double_tree())
            least = min(cost(route, world, nbytes) for route in routes)
            assert MARGIN * cost(fastest(), world, nbytes) <= least
