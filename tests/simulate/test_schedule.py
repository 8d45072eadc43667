"""The price of a schedule: cases worked out by hand, and laws that hold for all."""

from __future__ import annotations

from inspect import signature
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.axes.scheduling import MEMBERS, Cost, Event, Layer, Schedule, Slice, Task, fifo, wfbp
from shoal.errors import BadArgument
from shoal.simulate.schedule import schedule_seconds
from shoal.timeline.span import Span

# forward 1 + 2 + 3 = 6 s, backward 2 + 4 + 6 = 12 s; a message takes its bytes in seconds
LAYERS = (Layer("a", 5, 1, 2), Layer("b", 4, 2, 4), Layer("c", 3, 3, 6))


def cost(nbytes: int) -> float:
    return float(nbytes)


def task(layer: int, ready: Event, due: Event, *, phase: str = "reduce") -> Task:
    return Task((Slice(layer, 0, LAYERS[layer].nbytes),), phase, ready, due)  # type: ignore[arg-type]


def lane(spans: tuple[Span, ...], name: str) -> list[tuple[str, float, float]]:
    return [(span.name, span.start, span.seconds) for span in spans if span.lane == name]


def test_no_tasks_leave_compute_alone() -> None:
    seconds, spans = schedule_seconds((), LAYERS, cost)
    assert seconds == 18
    assert lane(spans, "compute") == [
        ("backward c", 0, 6),
        ("backward b", 6, 4),
        ("backward a", 10, 2),
        ("forward a", 12, 1),
        ("forward b", 13, 2),
        ("forward c", 15, 3),
    ]
    assert len(spans) == 6


def test_fifo_costs_backward_then_all_messages_then_forward() -> None:
    tasks = fifo(1).plan(LAYERS, cost)
    seconds, spans = schedule_seconds(tasks, LAYERS, cost)
    assert seconds == 12 + (3 + 4 + 5) + 6
    assert lane(spans, "wait") == [("before update", 12, 12)]
    assert lane(spans, "exchange") == [
        ("reduce c", 12, 3),
        ("reduce b", 15, 4),
        ("reduce a", 19, 5),
    ]


def test_wfbp_hides_all_but_what_leaves_last() -> None:
    tasks = [task(i, Event("backward", i), Event("update")) for i in (2, 1, 0)]
    seconds, spans = schedule_seconds(tasks, LAYERS, cost)
    # c goes 6-9, b waits for its gradient and goes 10-14, a is ready at 12 and goes 14-19
    assert [start for _, start, _ in lane(spans, "exchange")] == [6, 10, 14]
    assert seconds == 19 + 6


def test_what_is_due_at_forward_hides_behind_forward_too() -> None:
    tasks = [task(i, Event("backward", i), Event("forward", i)) for i in (2, 0, 1)]
    seconds, spans = schedule_seconds(tasks, LAYERS, cost)
    # a goes 12-17 and b 17-21: forward of a runs 17-18, of b 21-23, of c 23-26
    assert seconds == 26
    assert lane(spans, "wait") == [("before forward a", 12, 5), ("before forward b", 18, 3)]


def test_the_order_of_tasks_is_kept_even_where_it_hurts() -> None:
    tasks = [task(i, Event("backward", i), Event("update")) for i in (0, 1, 2)]
    assert schedule_seconds(tasks, LAYERS, cost).seconds == 12 + 12 + 6


def test_scatter_and_gather_are_the_two_halves_of_reduce() -> None:
    halves = [
        task(0, Event("backward", 0), Event("update"), phase="scatter"),
        task(0, Event("update"), Event("forward", 0), phase="gather"),
    ]
    whole = [task(0, Event("backward", 0), Event("update"))]
    assert (
        schedule_seconds(halves, LAYERS, cost).seconds
        == schedule_seconds(whole, LAYERS, cost).seconds
        == 12 + 5 + 6
    )


def test_a_message_of_several_layers_is_one_span_with_its_bytes() -> None:
    both = Task((Slice(2, 0, 3), Slice(1, 0, 4)), "reduce", Event("backward", 1), Event("update"))
    [span] = [s for s in schedule_seconds([both], LAYERS, cost).spans if s.lane == "exchange"]
    assert (span.name, span.nbytes, span.seconds) == ("reduce c .. b", 7, 7)


def test_a_task_due_before_it_is_ready_is_named() -> None:
    late = [
        task(2, Event("backward", 2), Event("update")),
        task(0, Event("update"), Event("update")),
    ]
    with pytest.raises(BadArgument, match=r"task 1 can never arrive.*update"):
        schedule_seconds(late, LAYERS, cost)


def test_a_task_of_a_layer_that_is_not_there_is_named() -> None:
    with pytest.raises(BadArgument, match=r"task 0: there is no layer 7"):
        schedule_seconds([task(0, Event("backward", 7), Event("update"))], LAYERS, cost)


times = st.floats(0, 10)
models = st.lists(
    st.builds(Layer, st.just("w"), st.integers(0, 100), times, times), min_size=1, max_size=6
)
lines = st.builds(
    lambda alpha, beta: lambda nbytes: alpha + beta * nbytes, st.floats(0, 5), st.floats(0, 1)
)
SIZED = [
    m for m in MEMBERS if any(p.default.__class__ is int for p in signature(m).parameters.values())
]
PLANS = [*(m(size) for m in SIZED for size in (1, 40, 1000)), *(m() for m in MEMBERS)]
each_schedule = pytest.mark.parametrize("schedule", PLANS, ids=repr)


@each_schedule
@given(layers=models, cost=lines)
@settings(max_examples=20, deadline=None)
def test_a_step_lasts_no_less_than_its_busiest_lane_and_no_more_than_all_in_turn(
    schedule: Schedule, layers: list[Layer], cost: Cost
) -> None:
    tasks = schedule.plan(layers, cost)
    seconds, spans = schedule_seconds(tasks, layers, cost)
    compute = sum(layer.forward + layer.backward for layer in layers)
    link = sum(cost(t.nbytes) * (1 if t.phase == "reduce" else 0.5) for t in tasks)
    bound = max(compute, layers[-1].backward + link)
    assert seconds >= bound * (1 - 1e-9)
    assert seconds <= (compute + link) * (1 + 1e-9) + 1e-9
    assert all(span.start >= 0 and span.seconds >= 0 for span in spans)
    assert max((span.end for span in spans), default=0) <= seconds * (1 + 1e-9)


@each_schedule
@given(layers=models, cost=lines)
@settings(max_examples=20, deadline=None)
def test_nobody_does_two_things_at_once(
    schedule: Schedule, layers: list[Layer], cost: Cost
) -> None:
    _, spans = schedule_seconds(schedule.plan(layers, cost), layers, cost)
    for lanes in ({"compute", "wait"}, {"exchange"}):
        busy = sorted((s.start, s.end) for s in spans if s.lane in lanes)
        for (_, end), (start, _) in pairwise(busy):
            assert start >= end - 1e-9


@given(layers=models, cost=lines)
@settings(max_examples=40, deadline=None)
def test_wfbp_costs_what_the_recurrence_of_its_paper_says(layers: list[Layer], cost: Cost) -> None:
    tasks = [
        Task((Slice(i, 0, layer.nbytes),), "reduce", Event("backward", i), Event("update"))
        for i, layer in reversed(list(enumerate(layers)))
    ]
    computed = sent = 0.0
    for layer in reversed(layers):
        computed += layer.backward
        sent = max(sent, computed) + cost(layer.nbytes)
    expected = max(computed, sent) + sum(layer.forward for layer in layers)
    assert schedule_seconds(tasks, layers, cost).seconds == pytest.approx(expected)


@given(layers=models, cost=lines)
@settings(max_examples=40, deadline=None)
def test_overlap_never_costs_more_when_the_messages_are_the_same(
    layers: list[Layer], cost: Cost
) -> None:
    seconds = [
        schedule_seconds(member(1).plan(layers, cost), layers, cost).seconds
        for member in (wfbp, fifo)
    ]
    assert seconds[0] <= seconds[1] * (1 + 1e-9) + 1e-9
