"""The fastest route differs with size and network; what bytes alone rule out is not even tried."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.axes.collectives import Collective, Network, fastest, native, walk
from shoal.axes.collectives.kit.choose import HOPELESS, MARGIN, ROUTES

KB, MB = 2**10, 2**20


def line(alpha: float, beta: float, nbytes: float) -> float:
    return alpha + beta * nbytes


def network(alpha: float = 1e-4, beta: float = 1e-9, native: float = 1e9) -> Network:
    return Network(partial(line, alpha, beta), partial(line, native, beta))


def chosen(nbytes: float, world: int, given: Network) -> Collective:
    choose = fastest().choose
    assert choose is not None
    return choose(nbytes, world, given)


def seconds(route: Collective, nbytes: float, world: int, given: Network) -> float:
    if route.rounds is None:
        return given.native(nbytes)
    return walk(route.rounds(world), nbytes / route.chunks(world), given.message)


def test_small_messages_go_in_few_and_large_ones_in_few_bytes() -> None:
    assert repr(chosen(4 * KB, 8, network())) == "butterfly"
    assert repr(chosen(16 * MB, 8, network())) == "halving_doubling"


def test_a_world_that_halving_does_not_suit_gets_a_ring_for_large_messages() -> None:
    assert repr(chosen(64 * MB, 6, network())) == "ring"


def test_the_border_moves_with_the_network() -> None:
    far, near = network(alpha=1e-2), network(alpha=1e-6)
    assert repr(chosen(64 * KB, 8, far)) == "butterfly"
    assert repr(chosen(64 * KB, 8, near)) == "halving_doubling"


def test_torchs_own_is_taken_where_it_was_measured_to_be_cheapest() -> None:
    assert chosen(MB, 4, network(native=0.0)) == native()
    assert chosen(MB, 4, network(native=1.0)) != native()


@settings(deadline=None, max_examples=40)
@given(
    nbytes=st.integers(1, 2**28),
    world=st.integers(2, 9),
    alpha=st.floats(1e-6, 1e-2),
    native_alpha=st.floats(1e-6, 1.0),
)
def test_no_route_is_cheaper_than_the_chosen_and_torchs_own_only_gives_way_to_a_fifth_less(
    nbytes: int, world: int, alpha: float, native_alpha: float
) -> None:
    given = network(alpha, native=native_alpha)
    route = chosen(nbytes, world, given)
    own = MARGIN * given.native(nbytes)
    best = own if route == native() else seconds(route, nbytes, world, given)
    assert best == min(own, *(seconds(each, nbytes, world, given) for each in ROUTES))


@pytest.mark.parametrize("nbytes", [1, MB])
def test_the_choice_is_the_same_each_time(nbytes: int) -> None:
    assert chosen(nbytes, 5, network()) == chosen(nbytes, 5, network())


def tried(nbytes: float, world: int, given: Network) -> tuple[Collective, ...]:
    offered = fastest().contenders
    assert offered is not None
    return offered(nbytes, world, given)


def test_small_messages_are_tried_by_every_route_and_torchs_own_is_the_surest() -> None:
    first, *others = tried(4 * KB, 8, network(native=1e-3))
    assert first == native()
    assert others == list(ROUTES)


def test_a_route_that_would_send_far_more_bytes_than_torchs_own_is_not_tried() -> None:
    slow = network(beta=1e-8, native=2 * 64 * MB * 1e-8)
    names = [repr(route) for route in tried(64 * MB, 16, slow)]
    assert "linear" not in names
    assert {"native", "ring", "halving_doubling"} <= set(names)


@settings(deadline=None, max_examples=40)
@given(nbytes=st.integers(1, 2**28), world=st.integers(2, 9), alpha=st.floats(1e-6, 1e-2))
def test_what_takes_long_by_its_messages_is_tried_but_not_by_its_bytes(
    nbytes: int, world: int, alpha: float
) -> None:
    given, free = network(alpha, native=1e-3), network(0.0)
    bound = HOPELESS * given.native(nbytes)
    offered = tried(nbytes, world, given)
    for route in ROUTES:
        assert (route in offered) == (seconds(route, nbytes, world, free) <= bound)
