"""The one loop behind every automatic choice: trial, choice, watch."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.tuner import Tuner, TunerState, close

SECONDS = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=6)


def played(tuner: Tuner, seconds: list[float]) -> tuple[list[int], TunerState]:
    """A whole trial: which candidate ran in each round, and the state after it."""
    order, state = [], tuner.start()
    while not tuner.tried(state):
        order.append(state.at)
        state = tuner.observe(tuner.advance(state), seconds[order[-1]])
    return order, state


def test_candidates_run_one_after_the_other_or_alternately() -> None:
    assert played(Tuner(3, tries=2), [1, 1, 1])[0] == [0, 0, 1, 1, 2, 2]
    assert played(Tuner(3, tries=2, takes_turns=True), [1, 1, 1])[0] == [0, 1, 2, 0, 1, 2]
    assert played(Tuner(1), [1])[0] == [0]


@given(SECONDS, st.integers(1, 4), st.booleans())
def test_every_candidate_runs_all_of_its_tries_and_what_it_took_is_its_own(
    seconds: list[float], tries: int, takes_turns: bool
) -> None:
    tuner = Tuner(len(seconds), tries, takes_turns=takes_turns)
    order, state = played(tuner, seconds)
    assert sorted(order) == sorted([*range(len(seconds))] * tries)
    assert state.summary(fmean) == pytest.approx(seconds)
    assert state.summary(max) == seconds


@given(SECONDS, st.floats(0.5, 1.0), st.integers(0, 5))
def test_the_current_one_stays_unless_another_is_clearly_faster(
    seconds: list[float], clearly: float, current: int
) -> None:
    known = dict(enumerate(seconds))
    chosen = Tuner(len(seconds), clearly=clearly).best(known, current)
    if current in known and min(seconds) >= clearly * seconds[current]:
        assert chosen == current
    else:
        assert seconds[chosen] == min(seconds)


@given(SECONDS, st.floats(0.5, 1.0), st.integers(0, 5))
def test_of_ordered_candidates_the_first_that_is_about_as_fast_is_chosen(
    seconds: list[float], clearly: float, current: int
) -> None:
    known = dict(enumerate(seconds))
    chosen = Tuner(len(seconds), clearly=clearly, ordered=True).best(known, current)
    bound = min(min(seconds) / clearly, known.get(current, math.inf))
    assert seconds[chosen] <= bound
    assert all(taken > bound for taken in seconds[:chosen])


def test_who_is_ruled_out_is_not_chosen() -> None:
    assert Tuner(3, clearly=0.5).best({1: 2.0, 2: 1.9}, 0) == 2
    assert Tuner(3, clearly=0.5, ordered=True).best({1: 2.0, 2: 1.9}, 0) == 1


def test_only_the_last_samples_are_kept() -> None:
    tuner = Tuner(1, tries=4, window=2)
    state = tuner.start()
    for seconds in (9.0, 1.0, 2.0):
        state = tuner.observe(tuner.advance(state), seconds)
    assert state.samples == (((1.0,), (2.0,)),)


def test_before_the_first_round_there_is_nothing_to_record() -> None:
    tuner = Tuner(2)
    assert tuner.observe(tuner.start(), 1.0) == tuner.start()


@pytest.mark.parametrize("other", [2.1, 0.4])
def test_another_time_at_two_looks_in_a_row_is_another_link(other: float) -> None:
    tuner = Tuner(2, changed=2.0)
    state = tuner.settle(tuner.start(), 1)
    for seconds in (1.0, other, 1.0, other, 1.9, 0.6):
        state = tuner.look(state, seconds)
        assert state.odd < 2
    state = tuner.look(tuner.look(state, other), other)
    assert state.odd == 2
    again = tuner.restart(state)
    assert (again.trying, again.at, again.odd, again.chosen) == (True, 0, 0, 1)


def test_a_slight_difference_is_none() -> None:
    tuner = Tuner(2, changed=2.0)
    state = tuner.look(tuner.start(), 0.1)
    assert tuner.look(state, 0.3).odd == 1
    assert tuner.look(state, 0.3, slight=0.25).odd == 0


def test_a_state_survives_as_plain_numbers() -> None:
    tuner = Tuner(2, tries=2)
    state = tuner.observe(tuner.advance(tuner.start()), 1.0, 2.0)
    assert TunerState(*tuple(state)) == state


@given(SECONDS, st.floats(1.0, 3.0), st.integers(1, 6))
def test_whoever_is_close_is_within_the_factor_and_the_fastest_comes_first(
    seconds: list[float], within: float, most: int
) -> None:
    near = close(dict(enumerate(seconds)), within, most)
    times = [seconds[index] for index in near]
    assert times == sorted(times)
    assert times[0] == min(seconds)
    assert times[-1] <= within * times[0]
    assert len(near) == min(most, sum(s <= within * min(seconds) for s in seconds))
