"""What steps took, from moments noted with a clock that we turn."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.flow import Mean
from shoal.runtime.tuning.choose import link_of
from shoal.runtime.tuning.measure import (
    MeasurementLayout,
    MessageTiming,
    StepRecord,
    StepTimer,
    backward_seconds,
    busy_seconds,
    service_seconds,
)
from shoal.wire.null import NullWire
from shoal.wire.wire import Ready


class Turned:
    """A clock that shows what it is told."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def record(began: float, arrivals: dict[str, float], *tasks: tuple[float, float]) -> StepRecord:
    made = StepRecord(began)
    made.arrivals = arrivals
    made.tasks = {index: list(span) for index, span in enumerate(tasks)}
    return made


def test_a_gradient_took_the_time_since_the_one_before() -> None:
    taken = backward_seconds(1.0, {"b": 1.5, "a": 4.0})
    assert taken == {"b": 0.5, "a": 2.5}


def test_messages_that_share_the_link_take_their_sum_together() -> None:
    messages = [
        MessageTiming(10, 0, 1),
        MessageTiming(10, 0, 2),
        MessageTiming(20, 0, 4),
        MessageTiming(20, 5, 7),
    ]
    assert service_seconds(messages) == {15: (4 + 2) / 4}


def test_steps_with_few_and_with_many_messages_tell_what_one_costs_by_itself() -> None:
    """All start at once and share the link, which takes 1 s a message and 0.01 s a byte."""
    few = service_seconds([MessageTiming(100, 0, 2), MessageTiming(100, 0, 4)])
    many = service_seconds([MessageTiming(20, 0, 1.2 * (k + 1)) for k in range(10)])
    link = link_of({**few, **many}, None)
    assert link.alpha == pytest.approx(1)
    assert link.beta == pytest.approx(0.01)


def test_a_pause_is_nobodys_time() -> None:
    messages = [MessageTiming(8, 0, 1), MessageTiming(8, 0.5, 2), MessageTiming(8, 4, 5)]
    assert busy_seconds(messages) == pytest.approx(3.0)
    assert busy_seconds([]) == 0


def test_empty_messages_tell_nothing() -> None:
    assert service_seconds([MessageTiming(0, 0, 1)]) == {}


def test_a_watch_notes_when_gradients_and_answers_come() -> None:
    clock = Turned()
    watch = StepTimer(clock)
    watch.step, clock.at = 3, 10.0
    watch.open()
    clock.at = 11.0
    watch.arrived("w")
    wire = watch.wire(0, NullWire())
    clock.at = 13.0
    pending = wire.ask(Mean(torch.ones(2)))
    clock.at = 15.0
    pending.wait()  # long after the answer was there
    seen = watch.records[3]
    assert (seen.began, seen.arrivals, seen.tasks) == (10.0, {"w": 11.0}, {0: [11.0, 13.0]})
    assert isinstance(NullWire().ask(Mean(torch.ones(2))), Ready)


def test_of_all_ranks_the_slowest_backward_and_the_shortest_message_count() -> None:
    layout = MeasurementLayout(("a", "b"), (8,), steps=2)
    early = layout.numbers(
        [record(0, {"b": 1, "a": 3}, (1, 9)), record(0, {"b": 1, "a": 3}, (1, 5))], [8], 4.0
    )
    late = layout.numbers([record(0, {"b": 4, "a": 5}, (8, 9)), None], [8], 6.0)
    seen = layout.seen([max(pair) for pair in zip(early, late, strict=True)])
    assert seen.backward == {"a": 2.0, "b": 4.0}
    assert seen.messages == {8: pytest.approx((1 + 4) / 2)}
    assert seen.step == 6.0


def test_a_rank_without_a_step_changes_nothing() -> None:
    layout = MeasurementLayout(("a",), (12,), steps=1)
    one = layout.numbers([record(0, {"a": 2}, (0, 1), (1, 4))], [8, 16], 1.0)
    none = layout.numbers([None], [8, 16], 0.0)
    assert [max(pair) for pair in zip(one, none, strict=True)] == one
    nothing = layout.seen(none)
    assert nothing.messages == {}
    assert nothing.step == math.inf


def test_changes_of_parameters_travel_by_name() -> None:
    layout = MeasurementLayout(("a", "b"), (), steps=1)
    assert layout.seen([0.0, 0.0, 1.0], [0.5, 0.25]).changes == {"a": 0.5, "b": 0.25}
