"""Laws of timelines: sorted, equal after reading back, aligned when merged."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.errors import BadArgument, UnknownName, UsageError
from shoal.timeline import LANES, NO_STEP, Span, Timeline

# no time limits: the machine may be busy with other things
relaxed = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
times = st.floats(-1e6, 1e6)
spans = st.builds(
    Span,
    worker=st.integers(0, 5),
    lane=st.sampled_from(LANES),
    name=st.text(max_size=8),
    start=times,
    seconds=st.floats(0, 1e3),
    nbytes=st.integers(0, 1 << 40),
    step=st.integers(NO_STEP, 9),
)
facts = st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.floats() | st.text())


def span(start: float, *, worker: int = 0, step: int = 0, lane: str = "compute") -> Span:
    return Span(worker, lane, "forward", start, 1.0, 0, step)


@relaxed
@given(st.lists(spans), facts)
def test_a_timeline_reads_back_equal(some: list[Span], meta: dict[str, object]) -> None:
    timeline = Timeline(some, meta)
    assert Timeline.from_json(timeline.to_json()) == timeline


@relaxed
@given(st.lists(spans))
def test_order_of_recording_does_not_matter(some: list[Span]) -> None:
    assert Timeline(some) == Timeline(reversed(some))
    assert [s.start for s in Timeline(some).spans] == sorted(s.start for s in some)


def test_a_timeline_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Timeline([span(0)]).spans = ()  # type: ignore[misc]


def test_workers_and_steps_are_those_with_spans() -> None:
    timeline = Timeline(
        [span(0, worker=3, step=7), span(1, worker=1, step=2), span(2, step=NO_STEP)]
    )
    assert timeline.workers == (0, 1, 3)
    assert timeline.steps == (2, 7)


def test_between_is_half_open_as_range_is() -> None:
    timeline = Timeline([span(i, step=i) for i in range(6)], {"model": "mlp"})
    assert timeline.between(2, 4).steps == (2, 3)
    assert timeline.between(2, 4).meta == {"model": "mlp"}


def test_merging_aligns_clocks_by_their_origin() -> None:
    early = Timeline([span(1.0, worker=0)], {"origin_ns": 1_000_000_000})
    late = Timeline([span(1.0, worker=1)], {"origin_ns": 3_500_000_000})
    merged = late.merge(early)
    assert {s.worker: s.start for s in merged.spans} == {0: 1.0, 1: 3.5}
    assert merged.meta["origin_ns"] == 1_000_000_000


def test_merging_without_origins_moves_nothing() -> None:
    merged = Timeline([span(1.0)]).merge(Timeline([span(2.0, worker=1)]))
    assert [s.start for s in merged.spans] == [1.0, 2.0]


def test_merging_unites_facts_by_worker_and_keeps_the_first_of_others() -> None:
    a = Timeline([], {"dropped": {"0": 4}, "model": "mlp"})
    b = Timeline([], {"dropped": {"1": 9}, "model": "gpt", "workers": 2})
    assert a.merge(b).meta == {"dropped": {"0": 4, "1": 9}, "model": "mlp", "workers": 2}


def test_facts_that_json_cannot_hold_become_text() -> None:
    meta = Timeline([], {"loss": math.nan, 3: (1, 2), "dtype": complex(1)}).meta  # type: ignore[dict-item]
    assert meta == {"loss": "nan", "3": [1, 2], "dtype": "(1+0j)"}


def test_an_unknown_lane_is_named_and_the_nearest_offered() -> None:
    with pytest.raises(UnknownName, match=r"lane 'exchagne': did you mean exchange"):
        Timeline([span(0, lane="exchagne")])


@pytest.mark.parametrize(
    ("start", "seconds"), [(math.nan, 1.0), (math.inf, 1.0), (0.0, -1.0), (0.0, math.nan)]
)
def test_times_that_make_no_sense_are_refused(start: float, seconds: float) -> None:
    with pytest.raises(BadArgument, match="finite"):
        Timeline([Span(0, "wait", "x", start, seconds, 0, 0)])


@pytest.mark.parametrize(
    "text",
    ["", "{}", "not json", '{"format": "other", "spans": 0, "meta": {}}', "[1]", "null", '"text"'],
)
def test_text_that_is_no_timeline_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no valid header"):
        Timeline.from_json(text)


@pytest.mark.parametrize("line", ["[0, 1]", "null", '[0, "nap", "x", 0, 1, 0, 0]', "[0, "])
def test_a_line_that_is_no_span_is_named(line: str) -> None:
    head = Timeline([span(0)]).to_json().splitlines()[0]
    with pytest.raises(UsageError, match="line 2"):
        Timeline.from_json(f"{head}\n{line}\n")


def test_a_text_cut_short_is_refused() -> None:
    lines = Timeline([span(0), span(1)]).to_json().splitlines()
    with pytest.raises(UsageError, match="1 of 2 spans"):
        Timeline.from_json("\n".join(lines[:2]))
