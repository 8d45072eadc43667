"""What cannot be combined, row by row of the map; why, and what to do instead."""

from __future__ import annotations

import itertools

import pytest

from shoal import rules
from shoal.errors import Conflict, ConflictError, UsageError
from shoal.rules import Facts
from shoal.strategy import Strategy, parse
from shoal.testing.contracts.matrix import kinds, samples_by_axis

# (strategy, a word of the reason, what one may write in its place)
REJECTED = [
    ("all_reduce, ssp(2)", "every worker has entered", "parameter_server, ssp(2)"),
    ("all_reduce, asp", "every worker has entered", "gossip, asp"),
    ("gossip, ssp(2)", "clock of the slowest worker", "gossip, asp"),
    ("gossip, topk(0.1)", "damage the model itself", "gossip, exact"),
    ("gossip, asp, cast(bfloat16)", "damage the model itself", "gossip, asp"),
    ("gossip, error_feedback(topk(0.1))", "damage the model itself", "gossip"),
    ("wfbp, local(4)", "no backward to overlap", "fifo, local(4)"),
    ("priority, local(4)", "no backward to overlap", "fifo, local(4)"),
    ("wfbp, gossip", "parameters are sent", "fifo, gossip"),
    ("wfbp, parameter_server, asp", "pushes once, after backward", "fifo, parameter_server, asp"),
    ("wfbp, shard(2)", "torch orders the messages", "fifo, shard(2)"),
    ("priority, pipe(2)", "torch orders the messages", "fifo, pipe(2)"),
    ("powersgd(2), priority", "whole matrices", "powersgd(2), wfbp"),
    ("error_feedback(powersgd(2)), priority", "whole matrices", "topk(0.1), priority"),
    ("powersgd(2), shard(2)", "whole matrices", "powersgd(2), tensor(2)"),
    ("powersgd(2), parameter_server, asp", "single message", "topk(0.1), parameter_server, asp"),
    ("powersgd(2), parameter_server, ssp(1)", "single message", "cast, parameter_server, ssp(1)"),
    ("ring, gossip", "no effect", "native, gossip"),
    ("ring, parameter_server", "no effect", "native, parameter_server"),
    ("ring, topk(0.1)", "sums messages", "ring, cast"),
    ("shard(2), parameter_server", "as one worker", "shard(2), all_reduce"),
    ("pipe(2), gossip", "as one worker", "pipe(2), all_reduce, local(4)"),
    ("data(1), topk(0.1)", "no peer to agree with", "data(2), topk(0.1)"),
    ("data(1), gossip", "no peer to agree with", "data(1)"),
    ("data(1), local(4)", "no peer to agree with", "data(1)"),
    ("data(1), ring", "no peer to agree with", "data(2), ring"),
    ("data(1), parameter_server, asp", "no peer to agree with", "data(1)"),
    ("error_feedback(exact)", "loses nothing", "exact"),
    ("error_feedback(error_feedback(topk(0.1)))", "own residual", "error_feedback(topk(0.1))"),
]


@pytest.mark.parametrize(("text", "why", "instead"), REJECTED, ids=[r[0] for r in REJECTED])
def test_row(text: str, why: str, instead: str) -> None:
    with pytest.raises(ConflictError) as caught:
        parse(text)
    assert any(why in conflict.why for conflict in caught.value.conflicts)
    parse(instead)


LEGAL = [
    "all_reduce, ssp(0)",
    "parameter_server, bsp, powersgd(2)",
    "parameter_server(2), asp, error_feedback(topk(0.1))",
    "parameter_server, local(8), cast",
    "priority, error_feedback(topk(0.1))",
    "shard(2), topk(0.1)",
    "shard(2) * tensor(2), local(8)",
    "ring, error_feedback(powersgd(2))",
    "local(8), error_feedback(powersgd(2))",
    "gossip, local(4)",
    "data(1)",
    "data(1), shard(4)",
]


@pytest.mark.parametrize("text", LEGAL)
def test_what_can_be_combined(text: str) -> None:
    assert rules.conflicts(parse(text)) == []


BOUND = [
    ("priority", Facts(4, clips=True), "norm needs all of them", "wfbp"),
    ("priority", Facts(4, skips=True), "before any of its updates ran", "wfbp"),
    ("topk(0.1)", Facts(4, closure=True), "exact gradients each time", "exact"),
    ("local(4)", Facts(4, closure=True), "exact gradients each time", "bsp"),
    ("gossip", Facts(4, closure=True), "exact gradients each time", "bsp"),
    ("priority", Facts(4, closure=True), "own step", "wfbp"),
    ("shard(2)", Facts(4, closure=True), "own step", "data"),
    ("shard(2)", Facts(4, models=2), "own loop", "data"),
    ("parameter_server", Facts(4, models=2), "own loop", "gossip"),
]


@pytest.mark.parametrize(("text", "facts", "why", "instead"), BOUND)
def test_row_that_shows_with_the_facts(text: str, facts: Facts, why: str, instead: str) -> None:
    strategy = parse(text)
    with pytest.raises(ConflictError) as caught:
        strategy.bind(facts)
    assert any(why in conflict.why for conflict in caught.value.conflicts)
    parse(instead).bind(facts)


def test_all_conflicts_with_the_facts_are_told_at_once() -> None:
    with pytest.raises(ConflictError) as caught:
        parse("priority, topk(0.1)").bind(Facts(2, clips=True, skips=True, closure=True))
    assert len(caught.value.conflicts) == 6


def test_every_rule_is_needed_by_some_product() -> None:
    told = set()
    for row in itertools.product(
        *kinds(samples_by_axis())
    ):  # of each kind that rules tell apart, one
        try:
            Strategy(*(kind[0] for kind in row))
        except ConflictError as error:
            told |= {conflict.why for conflict in error.conflicts}
    assert len(told) >= len(rules.RULES)


@pytest.mark.parametrize("text", [row[0] for row in REJECTED])
def test_every_conflict_has_what_why_and_instead(text: str) -> None:
    with pytest.raises(ConflictError) as caught:
        parse(text)
    for conflict in caught.value.conflicts:
        assert all(conflict)
        assert str(conflict) in str(caught.value)


def test_a_conflict_is_something_the_user_typed() -> None:
    error = ConflictError([Conflict("a x b", "they clash", "c")])
    assert isinstance(error, UsageError)
    assert error.exit_code == 2
    assert str(error) == "cannot be combined:\n  a x b: because they clash; instead: c"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("topk(0.1)", "error_feedback(topk(0.1))"),
        ("powersgd(2)", "error_feedback(powersgd(2))"),
        ("gossip, asp", "ssp(3)"),
        ("parameter_server, asp", "ssp(3)"),
        ("local(65)", "local(16)"),
        ("fifo", "wfbp"),
        ("fifo(1)", "fifo(1) leaves the link idle"),
    ],
)
def test_what_is_unwise_is_told_and_not_raised(text: str, told: str) -> None:
    assert any(told in line for line in parse(text).advice())


@pytest.mark.parametrize(
    "text", ["auto", "cast", "error_feedback(topk(0.1))", "local(8)", "gossip"]
)
def test_what_is_wise_is_left_in_peace(text: str) -> None:
    assert parse(text).advice() == ()


def test_advice_is_legal_itself() -> None:
    for text in ("topk(0.1)", "powersgd(2)"):
        (line,) = parse(text).advice()
        parse(line.partition(": ")[2].partition(" converges")[0])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("bmuf, wfbp", "the change of a whole step is sent"),
        ("bmuf, sign", "plus or minus one"),
        ("bmuf, asp", "every worker has entered"),
    ],
)
def test_block_momentum_filters_changes_of_all(text: str, why: str) -> None:
    with pytest.raises(ConflictError, match=why):
        parse(text)
    assert parse("bmuf, local(4)").advice() == ()
    assert "blocks of one step" in parse("bmuf").advice()[0]
