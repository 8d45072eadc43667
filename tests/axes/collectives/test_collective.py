"""Laws of every collective, in every world from 1 to 17 that it serves."""

from __future__ import annotations

import pickle

import pytest
from route_forms import ROUTES, SAMPLES, SERVED, WORLDS, rounds_of

from shoal.axes.collectives import MEMBERS, Collective, native, prove, ring
from shoal.errors import BadArgument

each_sample = pytest.mark.parametrize("text", SAMPLES)
each_case = pytest.mark.parametrize(("text", "world"), SERVED)

ANY = {"linear", "ring", "tree", "double_tree", "butterfly", "halving_doubling"}


@each_case
def test_every_rank_ends_with_every_part_once(text: str, world: int) -> None:
    prove(ROUTES[text], world)


@each_case
def test_rounds_are_the_same_each_time_they_are_asked_for(text: str, world: int) -> None:
    assert rounds_of(ROUTES[text], world) == rounds_of(ROUTES[text], world)


@each_case
def test_no_round_is_empty_and_one_worker_has_none(text: str, world: int) -> None:
    rounds = rounds_of(ROUTES[text], world)
    assert all(rounds)
    assert bool(rounds) == (world > 1)


@each_sample
def test_its_name_is_what_one_types(text: str) -> None:
    assert SAMPLES[text].name == repr(SAMPLES[text]) == text


@each_sample
def test_it_survives_the_way_to_another_process(text: str) -> None:
    again = pickle.loads(pickle.dumps(SAMPLES[text]))
    assert again == SAMPLES[text]
    if again.rounds is not None:
        assert list(again.rounds(4)) == rounds_of(SAMPLES[text], 4)


@pytest.mark.parametrize("text", sorted(ANY))
def test_routes_without_groups_serve_any_number_of_workers(text: str) -> None:
    assert not any(ROUTES[text].refusal(world) for world in WORLDS)


@pytest.mark.parametrize(
    ("text", "served"),
    [
        ("hierarchical(2)", [1, 2, 4, 6, 8, 10, 12, 14, 16]),
        ("hierarchical(3, double_tree(2))", [1, 3, 6, 9, 12, 15]),
        ("hierarchical(2, hierarchical(3))", [1, 2, 6, 12]),
        ("blueconnect(2, 2)", [1, 4, 8, 12, 16]),
        ("blueconnect(2, 3)", [1, 6, 12]),
    ],
)
def test_routes_with_groups_serve_their_multiples_and_refuse_the_rest(
    text: str, served: list[int]
) -> None:
    route = ROUTES[text]
    assert [world for world in WORLDS if not route.refusal(world)] == served
    for world in set(WORLDS) - set(served):
        with pytest.raises(BadArgument, match=r"workers cannot be divided|not a multiple"):
            rounds_of(route, world)


def test_equality_is_by_name() -> None:
    assert ring() == ring()
    assert len({ring(), ring(), native()}) == 2
    assert ring() == Collective("ring", rounds=None, chunks=len)  # type: ignore[arg-type]


def test_only_torchs_own_all_reduce_is_native() -> None:
    assert [m.__name__ for m in MEMBERS if SAMPLES.get(m.__name__, ring()).is_native] == ["native"]
