"""The recurrence and the simulator, which share no code, agree on every plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.axes.scheduling import MEMBERS, Layer, Schedule
from shoal.axes.scheduling.kit.playing import seconds
from shoal.simulate.schedule import schedule_seconds
from shoal.testing.contracts import make, samples

SCHEDULES = [make(text) for function in MEMBERS for text in samples(function)]
TIMES = st.floats(0, 0.02)
LAYERS = st.lists(
    st.builds(Layer, st.just("w"), st.integers(0, 2**21), TIMES, TIMES), min_size=1, max_size=5
)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@settings(max_examples=20, deadline=None)
@given(layers=LAYERS, alpha=TIMES)
def test_both_say_the_same(schedule: Schedule, layers: list[Layer], alpha: float) -> None:
    def cost(nbytes: int) -> float:
        return alpha + nbytes * 1e-8

    tasks = schedule.plan(layers, cost)
    played = schedule_seconds(tasks, layers, cost).seconds
    assert seconds(tasks, layers, cost) == pytest.approx(played)
