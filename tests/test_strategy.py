"""Six answers in one value, and the line of text that says it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal.axes.collectives as collectives
from shoal.axes import AXES, FUNCTIONS
from shoal.axes.compression import cast, error_feedback, exact, powersgd, topk
from shoal.axes.coordination import all_reduce, bmuf, gossip, parameter_server
from shoal.axes.partition import Partition
from shoal.axes.scheduling import fifo, priority, wfbp
from shoal.axes.synchrony import asp, bsp, local, ssp
from shoal.errors import BadArgument, ConflictError, UsageError
from shoal.rules import Facts
from shoal.strategy import Strategy, parse

sizes = st.integers(1, 2**40)
plain = st.one_of(
    st.floats(0, 1, exclude_min=True).map(topk),
    st.integers(1, 99).map(powersgd),
    st.sampled_from(["float16", "bfloat16"]).map(cast),
)
answers = {
    "partition": st.builds(Partition, st.none() | st.integers(1, 64), *[st.integers(1, 8)] * 3),
    "coordination": st.one_of(
        st.just(all_reduce()),
        st.just(gossip("ring")),
        st.integers(1, 64).map(parameter_server),
        st.floats(0, 0.99).map(bmuf),
    ),
    "synchrony": st.one_of(
        st.just(bsp()), st.just(asp()), st.integers(0, 99).map(ssp), st.integers(1, 999).map(local)
    ),
    "scheduling": st.one_of(sizes.map(fifo), sizes.map(wfbp), sizes.map(priority)),
    "compression": st.one_of(st.just(exact()), plain, plain.map(error_feedback)),
    "collectives": st.sampled_from([collectives.native(), collectives.ring()]),
}


@given(st.fixed_dictionaries({}, optional=answers))
def test_a_strategy_reads_back_as_it_is_written(given: dict[str, object]) -> None:
    try:
        s = Strategy(**given)  # type: ignore[arg-type]
    except ConflictError:
        return
    assert parse(repr(s)) == s
    assert hash(parse(repr(s))) == hash(s)
    assert repr(parse(repr(s))) == repr(s)


@given(st.fixed_dictionaries(answers))
def test_every_answer_reads_back_even_where_the_strategy_is_illegal(
    given: dict[str, object],
) -> None:
    for axis, value in given.items():
        try:
            read = getattr(parse(repr(value)), axis)
        except ConflictError:
            continue  # it cannot stand beside the plain answers
        assert read == value


@given(st.permutations(["shard(2)", "all_reduce", "local(8)", "fifo", "topk(0.5)", "native"]))
def test_answers_stand_in_any_order(items: list[str]) -> None:
    assert parse(", ".join(items)) == parse("shard(2), all_reduce, local(8), fifo, topk(0.5)")


@pytest.mark.parametrize("text", ["", "auto", "  auto ", "data", "all_reduce, bsp, wfbp, exact"])
def test_what_is_left_out_is_the_plainest(text: str) -> None:
    assert parse(text) == Strategy()
    assert repr(Strategy()) == "data, all_reduce, bsp, wfbp, exact, native"


@pytest.mark.parametrize(
    "text", ["local(8)", "gossip", "gossip, asp", "parameter_server, asp", "shard(2)", "pipe(2)"]
)
def test_what_cannot_overlap_is_sent_after_backward(text: str) -> None:
    assert parse(text).scheduling == fifo()


@pytest.mark.parametrize("text", ["local(1)", "ssp(0)", "parameter_server", "topk(0.1)", "data(4)"])
def test_what_can_overlap_does(text: str) -> None:
    assert parse(text).scheduling == wfbp()


def test_cuts_multiply_however_they_are_written() -> None:
    expected = Partition(data=2, shard=2, tensor=4, pipe=1)
    for text in (
        "data(2) * shard(2) * tensor(4)",
        "data=2, shard=2, tensor=4",
        "tensor(4), data(2), shard = 2",
        "data(2) * tensor(2), tensor(2), shard(2)",
    ):
        assert parse(text).partition == expected


def test_two_answers_to_one_question_are_refused_with_both_named() -> None:
    with pytest.raises(UsageError, match=r"topk\(0.1\) and exact are two techniques"):
        parse("topk(0.1), exact")
    with pytest.raises(UsageError, match="data appears twice"):
        parse("data(2), data(3)")


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("wrong", ["exact", None, 3, exact])
def test_an_answer_of_another_kind_is_refused(axis: str, wrong: object) -> None:
    with pytest.raises(BadArgument, match="it must be a "):
        Strategy(**{axis: wrong})  # type: ignore[arg-type]


def test_a_strategy_cannot_be_changed_but_replaced() -> None:
    s = Strategy()
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.compression = topk(0.1)  # type: ignore[misc]
    assert dataclasses.replace(s, compression=topk(0.1)) == parse("topk(0.1)")
    with pytest.raises(ConflictError):
        dataclasses.replace(s, synchrony=asp())


def test_equality_is_by_what_one_types() -> None:
    assert len({parse("topk(0.1)"), parse("topk(.1)"), parse("topk(0.11)")}) == 2
    assert topk(0.1234567) != topk(0.1234568)
    assert topk(1) == topk(1.0)


def test_all_conflicts_are_told_at_once() -> None:
    with pytest.raises(ConflictError) as caught:
        parse("gossip, ssp(2), priority, topk(0.1), ring, shard(2)")
    assert len(caught.value.conflicts) == 5
    told = str(caught.value)
    assert told.startswith("5 conflicts:")
    assert told.count("because") == told.count("instead:") == 5


@pytest.mark.parametrize(
    "text",
    [
        "topk(0)", "topk(1.5)", "topk(-0.1)", "topk(nan)", "topk(x)", "powersgd(0)",
        "powersgd(1.5)", "powersgd(True)", "cast(float32)", "ssp(-1)", "ssp(1.5)", "ssp(inf)",
        "local(0)", "local(x)", "parameter_server(0)", "parameter_server(65)", "gossip(star)",
        "gossip(3)", "fifo(0)", "wfbp(-1)", "priority(1.5)", "data(0)", "shard(0)", "tensor(x)",
        "pipe(65537)", "error_feedback(3)", "error_feedback(ring)", "data=0",
    ],
)  # fmt: skip
def test_an_argument_outside_its_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert not isinstance(caught.value, ConflictError)


def test_binding_checks_the_degrees_against_the_ranks() -> None:
    assert parse("shard(2)").bind(Facts(ranks=4)) == parse("shard(2)")
    with pytest.raises(UsageError, match=r"3 workers cannot be cut .* a multiple of 2"):
        parse("shard(2)").bind(Facts(ranks=3))
    with pytest.raises(UsageError, match=r"multiply to 4; start 4"):
        parse("data(2), pipe(2)").bind(Facts(ranks=8))


def _required(function: Callable[..., object]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return function is not FUNCTIONS["tuned"] and any(p.default is p.empty for p in parameters)


def test_every_technique_can_be_typed_alone_or_says_what_it_lacks() -> None:
    lacking = {name for name, f in FUNCTIONS.items() if _required(f)}
    assert {"topk", "local", "ssp", "shard"} <= lacking
    for name in FUNCTIONS.keys() - lacking:
        with contextlib.suppress(ConflictError):
            assert parse(name)
    for name in lacking:
        with pytest.raises(BadArgument, match=r"missing|needs"):
            parse(name)


def test_infinity_is_asp() -> None:
    assert math.isinf(parse("parameter_server, asp").synchrony.staleness)
