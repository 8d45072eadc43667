"""Laws of every collective."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable

import pytest

from shoal.axes.collectives import MEMBERS, Collective, native, prove, ring

WORLDS = (1, 2, 3, 4, 5, 7, 8, 16)

each_member = pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.__name__)


@each_member
@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_ends_with_every_part_once(member: Callable[[], Collective], world: int) -> None:
    prove(member(), world)


@each_member
def test_its_name_is_what_one_types(member: Callable[[], Collective]) -> None:
    assert member().name == repr(member()) == member.__name__


@each_member
def test_it_has_a_line_of_summary_and_references(member: Callable[[], Collective]) -> None:
    summary = (inspect.getdoc(member) or "").splitlines()[0]
    assert summary.endswith(".")
    assert "References:" in (inspect.getmodule(member).__doc__ or "")


@each_member
def test_it_survives_the_way_to_another_process(member: Callable[[], Collective]) -> None:
    assert pickle.loads(pickle.dumps(member())) == member()


@each_member
@pytest.mark.parametrize("world", WORLDS)
def test_rounds_are_the_same_each_time_they_are_asked_for(
    member: Callable[[], Collective], world: int
) -> None:
    rounds = member().rounds
    if rounds is not None:
        assert list(rounds(world)) == list(rounds(world))


def test_equality_is_by_name() -> None:
    assert ring() == ring()
    assert len({ring(), ring(), native()}) == 2
    assert ring() == Collective("ring", rounds=None, chunks=len)  # type: ignore[arg-type]
