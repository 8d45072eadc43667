"""What is particular to each route: who sends what to whom, and what is refused."""

from __future__ import annotations

from collections import Counter

import pytest
from route_forms import rounds_of

from shoal.axes.collectives import (
    Collective,
    Copy,
    blueconnect,
    butterfly,
    double_tree,
    fastest,
    halving_doubling,
    hierarchical,
    linear,
    native,
    ring,
    tree,
)
from shoal.axes.collectives.double_tree import edges, trees
from shoal.errors import BadArgument

POWERS = (2, 4, 8, 16)


def sent(route: Collective, world: int) -> Counter[int]:
    """Chunks that each rank sends in all."""
    return Counter(copy.source for copies in rounds_of(route, world) for copy in copies)


@pytest.mark.parametrize("world", [2, 3, 7])
def test_linear_has_one_end_of_every_copy_at_the_first(world: int) -> None:
    copies = [copy for copies in rounds_of(linear(), world) for copy in copies]
    assert all(0 in (copy.source, copy.target) for copy in copies)
    assert len(copies) == 2 * (world - 1)


def test_a_tree_of_five_climbs_and_comes_down() -> None:
    up = [(Copy(1, 0, 0, True), Copy(3, 2, 0, True)), (Copy(2, 0, 0, True),)]
    down = [(Copy(0, 2, 0, False),), (Copy(0, 1, 0, False), Copy(2, 3, 0, False))]
    assert rounds_of(tree(), 5) == [
        *up,
        (Copy(4, 0, 0, True),),
        (Copy(0, 4, 0, False),),
        *down,
    ]


@pytest.mark.parametrize("world", POWERS)
def test_in_a_butterfly_all_swap_in_every_round(world: int) -> None:
    for k, copies in enumerate(rounds_of(butterfly(), world)):
        assert copies == tuple(Copy(r, r ^ 2**k, 0, True) for r in range(world))


@pytest.mark.parametrize("route", [butterfly(), halving_doubling()])
@pytest.mark.parametrize("world", [3, 5, 6, 7, 13])
def test_those_beyond_a_power_of_two_are_folded_in_and_out(route: Collective, world: int) -> None:
    power = 2 ** (world.bit_length() - 1)
    first, *inner, last = rounds_of(route, world)
    assert {(copy.source, copy.target) for copy in first} == {
        (rank, rank - power) for rank in range(power, world)
    }
    assert {(c.target, c.source) for c in last} == {(c.source, c.target) for c in first}
    assert inner == rounds_of(route, power)


@pytest.mark.parametrize("world", POWERS)
def test_halving_doubling_sends_as_few_bytes_as_a_ring(world: int) -> None:
    assert halving_doubling().chunks(world) == ring().chunks(world)
    assert sent(halving_doubling(), world) == sent(ring(), world)


def test_what_two_halve_lies_side_by_side() -> None:
    for copies in rounds_of(halving_doubling(), 8):
        for rank in range(8):
            chunks = [copy.chunk for copy in copies if copy.source == rank]
            assert chunks == list(range(chunks[0], chunks[0] + len(chunks)))


@pytest.mark.parametrize("world", range(2, 40))
def test_who_is_inside_one_tree_is_a_leaf_of_the_other(world: int) -> None:
    one, other = trees(world)
    inside = set(one) & set(other) - {None}
    assert len(inside) <= world % 2  # of an odd world one is inside of both
    for both in (one, other):
        assert both.count(None) == 1
        assert max(Counter(both).values()) <= 2


@pytest.mark.parametrize("world", range(2, 40))
def test_a_broadcast_down_both_trees_gives_nobody_two_things_to_do(world: int) -> None:
    for ends in ("rank", "up"):
        busy = [(getattr(edge, ends), edge.start % 2) for edge in edges(trees(world))]
        assert len(busy) == len(set(busy))


@pytest.mark.parametrize("segments", [1, 4, 16])
@pytest.mark.parametrize("world", [2, 3, 4, 7, 8, 16, 33])
def test_a_double_tree_gives_nobody_two_things_to_do_in_a_round(segments: int, world: int) -> None:
    rounds = rounds_of(double_tree(segments), world)
    for copies in rounds:
        assert max(Counter(copy.source for copy in copies).values()) == 1
        assert max(Counter(copy.target for copy in copies).values()) == 1
    assert len(rounds) <= 4 * (segments + (world - 1).bit_length() - 1)


def test_groups_are_by_number_and_every_worker_talks_across() -> None:
    inside, *across, back = rounds_of(hierarchical(2), 6)
    for copies in (inside, back):
        assert all(copy.source // 2 == copy.target // 2 for copy in copies)
    for copies in across:
        assert {copy.source for copy in copies} == set(range(6))
        assert all(copy.source % 2 == copy.target % 2 == copy.chunk // 3 for copy in copies)


def test_each_level_of_blueconnect_carries_what_the_inner_ones_left() -> None:
    route = blueconnect(2, 3)
    per_round = [
        Counter(copy.source for copy in copies)[0] / route.chunks(12)
        for copies in rounds_of(route, 12)
    ]
    out = [1 / 2, 1 / 6, 1 / 6, 1 / 12]
    assert per_round == pytest.approx(out + out[::-1])


def test_one_level_of_blueconnect_is_the_hierarchical_route() -> None:
    assert rounds_of(blueconnect(2), 8) == rounds_of(hierarchical(2), 8)
    assert rounds_of(blueconnect(2, 2), 8) == rounds_of(hierarchical(2, hierarchical(2)), 8)


def test_groups_of_one_leave_the_outer_route_as_it_is() -> None:
    assert rounds_of(hierarchical(1, tree()), 5) == rounds_of(tree(), 5)


@pytest.mark.parametrize("bad", [0, -2, 2.0, True, "two", 10**6])
def test_a_size_that_is_none_is_refused(bad: object) -> None:
    for make in (hierarchical, blueconnect, double_tree):
        with pytest.raises(BadArgument, match="whole number"):
            make(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("outer", [native(), fastest(), "ring"])
def test_across_groups_goes_a_route_with_rounds(outer: Collective) -> None:
    with pytest.raises(BadArgument, match="such as ring"):
        hierarchical(2, outer)


def test_levels_must_be_named() -> None:
    with pytest.raises(BadArgument, match="a group size is missing"):
        blueconnect()
