"""The form: what is written is read back, and what does not fit is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.bench.report import Header, Interval, Machine, Report, Result, Threshold
from shoal.errors import BadArgument

HEADER = Header(
    suite="overhead",
    commit="0" * 40,
    date="2026-01-31T12:00:00+00:00",
    machine=Machine("some cpu", 2, 2**34, "Linux 6.1"),
    versions={"python": "3.12.1", "torch": "2.13.0", "shoal": "0.1.0"},
    seeds=(0,),
)
TIMED = Result(
    "mlp",
    "step time",
    42.0,
    "ms",
    "ddp",
    1.01,
    Interval(0.99, 1.03),
    threshold="<= 1.02",
    passes=True,
)
PLAIN = Result("import shoal", "import time", 0.05, "s")
REPORT = Report(HEADER, (TIMED, PLAIN))

numbers = st.floats(allow_nan=False, allow_infinity=False)
words = st.text('ab µ"\\[', min_size=1, max_size=8)


@st.composite
def results(draw: st.DrawFn) -> Result:
    against = draw(st.none() | words)
    ends = sorted([draw(numbers), draw(numbers)])
    threshold = draw(st.none() | st.sampled_from(["<= 1.02", "> 3", ">= -1e-3", "< 7"]))
    return Result(
        draw(words),
        draw(words),
        draw(numbers),
        draw(words),
        against,
        None if against is None else draw(numbers),
        draw(st.sampled_from([None, Interval(*ends)])),
        threshold,
        None if threshold is None else draw(st.sampled_from([True, False, None])),
    )


@given(st.lists(results(), max_size=4))
def test_what_is_written_is_read_back(rows: list[Result]) -> None:
    report = Report(HEADER, tuple(rows))
    assert Report.from_json(report.to_json()) == report


def test_the_keys_are_those_of_the_issue_and_in_its_order() -> None:
    tree = json.loads(REPORT.to_json())
    assert list(tree) == ["header", "results"]
    assert list(tree["header"]) == ["suite", "commit", "date", "machine", "versions", "seeds"]
    assert list(tree["header"]["machine"]) == ["cpu", "cores", "memory_nbytes", "kernel"]
    for row in tree["results"]:
        assert " ".join(row) == "case metric value unit against ratio interval bar holds"


def test_values_have_the_types_of_the_form() -> None:
    timed, plain = json.loads(REPORT.to_json())["results"]
    assert timed["interval"] == [0.99, 1.03]
    assert timed["bar"] == "<= 1.02"
    assert timed["holds"] is True
    assert [plain[k] for k in ("against", "ratio", "interval", "bar", "holds")] == [None] * 5


def _with(path: str, value: Any) -> str:
    tree = json.loads(REPORT.to_json())
    *way, last = path.split(".")
    here = tree
    for key in way:
        here = here[int(key) if key.isdigit() else key]
    here[last] = value
    return json.dumps(tree)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("more", 1, "more"),
        ("header.more", 1, "more"),
        ("header.suite", "", "suite"),
        ("header.suite", 3, "suite"),
        ("header.date", "yesterday", "yesterday"),
        ("header.date", "2026-01-31T12:00:00", "time zone"),
        ("header.machine", "a box", "machine"),
        ("header.machine.cores", 2.5, "cores"),
        ("header.versions", {"python": "3.12"}, "shoal, torch"),
        ("header.seeds", ["a"], "seeds"),
        ("header.seeds", 1, "seeds"),
        ("results", {}, "results"),
        ("results.0.threshold", "<= 1", "threshold"),
        ("results.0.value", "42", "value"),
        ("results.0.value", True, "value"),
        ("results.0.value", float("nan"), "value"),
        ("results.0.case", "", "case"),
        ("results.0.against", None, "against"),
        ("results.1.ratio", 1.0, "ratio"),
        ("results.0.interval", [1.1, 0.9], "interval"),
        ("results.0.interval", [1.1], "interval"),
        ("results.0.bar", "about 1", "about 1"),
        ("results.0.holds", "yes", "holds"),
        ("results.1.holds", True, "holds"),
    ],
)
def test_what_does_not_fit_is_refused_and_named(path: str, value: Any, named: str) -> None:
    with pytest.raises(BadArgument, match=named):
        Report.from_json(_with(path, value))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"header": {}}'])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(BadArgument, match="report"):
        Report.from_json(text)


def test_infinity_is_never_written() -> None:
    with pytest.raises(BadArgument, match="finite"):
        replace(PLAIN, value=float("inf"))


@pytest.mark.parametrize("text", ["<= 1.02", ">= 0.5", "< 3", "> -1"])
def test_a_bar_prints_as_what_it_was_parsed_from(text: str) -> None:
    assert str(Threshold.parse(text)) == text
    assert Threshold.parse(f"  {text.replace(' ', '')} ") == Threshold.parse(text)


@pytest.mark.parametrize("text", ["", "1.02", "= 1", "<= ", "<= one", "<= nan", "<= 1 2", None])
def test_what_is_no_bar_is_refused(text: Any) -> None:
    with pytest.raises(BadArgument, match="a threshold must be one of"):
        Threshold.parse(text)


@pytest.mark.parametrize(
    ("threshold", "number", "slack", "met"),
    [
        ("<= 1", 1.0, 0.0, True),
        ("< 1", 1.0, 0.0, False),
        ("<= 1", 1.01, 0.02, True),
        ("<= 1", 1.03, 0.02, False),
        (">= 2", 1.99, 0.0, False),
        (">= 2", 1.99, 0.02, True),
        ("> 2", 2.0, 0.0, False),
    ],
)
def test_slack_widens_a_bar_to_its_lenient_side(
    threshold: str, number: float, slack: float, met: bool
) -> None:
    assert Threshold.parse(threshold).met(number, slack=slack) is met


@pytest.mark.parametrize(
    ("passes", "code"),
    [((), 0), ((True,), 0), ((True, False), 1), ((True, None), 3), ((None, False), 1)],
)
def test_a_failed_bar_weighs_more_than_a_missing_verdict(
    passes: tuple[bool | None, ...], code: int
) -> None:
    rows = tuple(replace(TIMED, passes=each) for each in passes)
    assert Report(HEADER, (PLAIN, *rows)).exit_code == code
