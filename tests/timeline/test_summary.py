"""Laws of the summary: time is counted once, and all of it is accounted for."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.timeline import LANES, NO_STEP, Span, Timeline
from shoal.timeline.summary import PARTS, Row

# no time limits: the machine may be busy with other things
relaxed = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
spans = st.builds(
    Span,
    worker=st.integers(0, 2),
    lane=st.sampled_from(LANES),
    name=st.just("x"),
    start=st.integers(0, 50).map(float),
    seconds=st.integers(0, 9).map(float),
    nbytes=st.integers(0, 9),
    step=st.integers(0, 3),
)


def row(*some: tuple[str, float, float, int]) -> Row:
    """The row of one worker that did ``(lane, from, to, step)``."""
    made = (Span(0, lane, lane, a, b - a, 10, step) for lane, a, b, step in some)
    return Timeline(made).summary().rows[0]


def test_nested_spans_count_once() -> None:
    assert row(("compute", 0, 10, 0), ("compute", 2, 4, 0), ("compute", 8, 12, 0)).compute == 12


def test_exchange_under_compute_is_overlapped_and_the_rest_exposed() -> None:
    found = row(("compute", 0, 10, 0), ("exchange", 6, 13, 0), ("exchange", 8, 14, 0))
    assert (found.exchange, found.overlapped, found.exposed) == (8, 4, 4)
    assert found.nbytes == 20


def test_exchange_under_the_next_steps_compute_is_overlapped() -> None:
    found = row(("compute", 0, 4, 0), ("exchange", 4, 8, 0), ("compute", 5, 9, 1))
    assert found.overlapped == 3
    assert found.wall == 9


def test_what_lies_between_steps_belongs_to_neither() -> None:
    found = row(("compute", 0, 4, 0), ("compute", 10, 14, 1))
    assert (found.wall, found.steps, found.step_seconds) == (8, 2, 4)


def test_spans_of_no_step_are_left_out() -> None:
    found = row(("compute", 0, 4, 0), ("compute", 4, 99, NO_STEP))
    assert found.wall == 4


def test_a_wait_for_an_exchange_is_the_exchanges_part() -> None:
    found = row(("compute", 0, 4, 0), ("exchange", 2, 6, 0), ("wait", 4, 7, 0), ("data", 9, 10, 0))
    assert found.wait == 3
    assert dict(zip(PARTS, found.parts, strict=True)) == {
        "compute": 4,
        "data": 1,
        "exchange": 2,
        "wait": 1,
        "idle": 2,
    }


@relaxed
@given(st.lists(spans))
def test_parts_sum_to_the_wall_time(some: list[Span]) -> None:
    summary = Timeline(some).summary()
    for found in (*summary.rows, summary.total):
        assert sum(found.parts) == pytest.approx(found.wall)
        assert found.exposed + found.overlapped == pytest.approx(found.exchange)
        assert all(part >= 0 for part in found.parts)


@relaxed
@given(st.lists(spans))
def test_the_total_is_the_sum_of_the_workers(some: list[Span]) -> None:
    rows, total = Timeline(some).summary()
    assert total.wall == pytest.approx(sum(found.wall for found in rows))
    assert total.steps == sum(found.steps for found in rows)
    assert total.nbytes == sum(s.nbytes for s in some if s.lane == "exchange")


def test_an_empty_timeline_has_an_empty_summary() -> None:
    rows, total = Timeline([]).summary()
    assert rows == ()
    assert (total.wall, total.step_seconds, total.share(0.0)) == (0, 0, 0)
