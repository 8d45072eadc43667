"""Virtual time passes in order, the same way each time, and never by waiting."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import BadArgument
from shoal.simulate.clock import Clock, ClockEvent, Process


@given(st.lists(st.floats(0, 1e9), max_size=30))
def test_things_happen_in_order_of_time_and_ties_in_order_of_asking(times: list[float]) -> None:
    clock, seen = Clock(), []

    def happen(index: int) -> None:
        seen.append((clock.now, index))

    for index, time in enumerate(times):
        clock.at(time, partial(happen, index))
    assert clock.run() == max(times, default=0)
    assert seen == sorted((time, index) for index, time in enumerate(times))


def test_run_until_includes_that_instant_and_leaves_the_rest() -> None:
    clock = Clock()
    seen: list[float] = []
    for time in (1, 2, 3):
        clock.at(time, partial(seen.append, time))
    assert clock.run(until=2) == 2
    assert seen == [1, 2]
    assert clock.run(until=2.5) == clock.now == 2.5
    clock.after(0.25, lambda: seen.append(clock.now))
    clock.run()
    assert seen == [1, 2, 2.75, 3]


def test_what_happens_may_ask_for_more() -> None:
    clock, seen = Clock(), []

    def tick() -> None:
        seen.append(clock.now)
        if len(seen) < 3:
            clock.after(1, tick)

    tick()
    clock.run()
    assert seen == [0, 1, 2]


def test_a_process_sleeps_by_yielding_seconds() -> None:
    clock = Clock()

    def worker() -> Process:
        yield 1.5
        yield 0
        yield 2
        return clock.now

    ended = clock.start(worker())
    assert not ended.happened
    clock.run()
    assert (ended.happened, ended.value) == (True, 3.5)


def test_those_who_wait_go_on_at_the_instant_with_the_value_first_come_first() -> None:
    clock, seen = Clock(), []
    bell = clock.event()

    def waiter(name: str) -> Process:
        value = yield bell
        seen.append((name, value, clock.now))

    for name in "ba":
        clock.start(waiter(name))
    clock.at(4, lambda: bell.fire("ding"))
    clock.run()
    assert seen == [("b", "ding", 4), ("a", "ding", 4)]


def test_waiting_for_what_has_happened_takes_no_time() -> None:
    clock = Clock()
    bell = clock.event()
    bell.fire(7)

    def late() -> Process:
        yield 3
        return (yield bell), clock.now

    ended = clock.start(late())
    clock.run()
    assert ended.value == (7, 3)


def test_a_process_may_wait_for_another() -> None:
    clock = Clock()

    def child() -> Process:
        yield 2
        return "grown"

    def parent() -> Process:
        word = yield clock.start(child())
        return word, clock.now

    ended = clock.start(parent())
    clock.run()
    assert ended.value == ("grown", 2)


def test_those_who_wait_for_ever_are_counted() -> None:
    clock = Clock()

    def waits(event: ClockEvent) -> Process:
        yield event

    clock.start(waits(clock.event()))
    clock.run()
    assert clock.running == 1


def test_an_error_in_a_process_comes_out_of_run() -> None:
    clock = Clock()

    def breaks() -> Process:
        yield 1
        raise ArithmeticError("one is enough")

    clock.start(breaks())
    with pytest.raises(ArithmeticError, match="enough"):
        clock.run()


@pytest.mark.parametrize("delay", [-1e-9, float("nan"), float("inf")])
def test_time_does_not_run_backwards_nor_for_ever(delay: float) -> None:
    clock = Clock()
    with pytest.raises(BadArgument, match="after"):
        clock.after(delay, lambda: None)


def test_the_past_cannot_be_asked_for() -> None:
    clock = Clock()
    clock.run(until=5)
    with pytest.raises(BadArgument, match=r"at\(4\)"):
        clock.at(4, lambda: None)
    with pytest.raises(BadArgument, match="until=4"):
        clock.run(until=4)


def test_an_event_happens_once() -> None:
    event = Clock().event()
    event.fire()
    with pytest.raises(BadArgument, match="already happened"):
        event.fire()
