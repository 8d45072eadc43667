"""A route that does not serve so many workers is a conflict, as soon as their number is known."""

from __future__ import annotations

import pytest

from shoal.errors import ConflictError
from shoal.rules import Facts
from shoal.strategy import parse


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("hierarchical(2)", 3), ("hierarchical(3, tree)", 4), ("blueconnect(2, 2)", 6)],
)
def test_a_number_of_workers_that_makes_no_groups_is_a_conflict_at_binding(
    text: str, ranks: int
) -> None:
    with pytest.raises(ConflictError, match=rf"x {ranks} workers.*instead: use ring") as caught:
        parse(text).bind(Facts(ranks=ranks))
    assert len(caught.value.conflicts) == 1


@pytest.mark.parametrize("text", ["hierarchical(2)", "blueconnect(2, 2)", "fastest", "butterfly"])
def test_a_number_that_does_is_none(text: str) -> None:
    for ranks in (1, 4, 8):
        parse(text).bind(Facts(ranks=ranks))


def test_a_number_named_in_the_strategy_is_checked_at_once() -> None:
    with pytest.raises(ConflictError, match="3 workers"):
        parse("data(3), hierarchical(2)")
    assert parse("data(4), hierarchical(2)")


def test_replicas_count_and_not_ranks() -> None:
    cut = parse("tensor(2), hierarchical(2)")
    cut.bind(Facts(ranks=8))
    with pytest.raises(ConflictError, match="3 workers"):
        cut.bind(Facts(ranks=6))


@pytest.mark.parametrize("text", ["gossip, fastest", "topk(0.1), fastest", "data(1), fastest"])
def test_choosing_a_route_where_none_runs_is_a_conflict_as_with_any_route(text: str) -> None:
    with pytest.raises(ConflictError):
        parse(text)
