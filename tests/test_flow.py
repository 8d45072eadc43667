"""The language of agreement: who asks, who answers, and what flows fused do."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.axes.compression import Value, exact, powersgd, topk
from shoal.errors import UsageError
from shoal.flow import (
    Agreed,
    All,
    Ask,
    Dense,
    Flow,
    Fold,
    Folded,
    Gather,
    Mean,
    Pair,
    Push,
    Scatter,
    Spread,
    alone,
    drive,
    nbytes,
    together,
    tree,
)


def asking(*numbers: float) -> Flow:
    """Ask for each number in turn; end with what was answered."""
    told = []
    for number in numbers:
        told.append((yield Mean(torch.tensor(number))))
    return Agreed(torch.tensor(sum(map(float, told))), Dense(torch.zeros(())), len(told))


def double(ask: Ask) -> Any:
    match ask:
        case All(asks):
            return tuple(double(one) for one in asks)
        case Mean(tensor):
            return 2 * tensor
        case other:
            raise AssertionError(other)


def counted(flow: Generator[Ask, Any, Any]) -> tuple[Any, list[Ask]]:
    asks: list[Ask] = []

    def answer(ask: Ask) -> Any:
        asks.append(ask)
        return double(ask)

    return drive(flow, answer), asks


def test_drive_answers_each_ask_and_gives_what_the_flow_ends_with() -> None:
    assert drive(asking(1, 2, 3), double).mean == 12
    assert drive(asking(), double).state == 0


@given(st.lists(st.lists(st.integers(-9, 9), max_size=4), max_size=5))
def test_flows_together_end_as_each_would_alone(numbers: list[list[int]]) -> None:
    ends = drive(together(asking(*n) for n in numbers), double)
    assert [end.mean for end in ends] == [2 * sum(n) for n in numbers]
    assert [end.state for end in ends] == [len(n) for n in numbers]


@given(st.lists(st.lists(st.integers(-9, 9), max_size=4), max_size=5))
def test_flows_together_take_as_many_messages_as_the_longest(numbers: list[list[int]]) -> None:
    _, asks = counted(together(asking(*n) for n in numbers))
    assert len(asks) == max(map(len, numbers), default=0)
    widths = [len(ask.asks) for ask in asks if isinstance(ask, All)]
    assert widths == [sum(len(n) > i for n in numbers) for i in range(len(asks))]


def test_an_ask_of_one_and_an_ask_of_two_travel_together() -> None:
    compressor = powersgd(1)
    values = [Value(torch.ones(6, 6), "matrix"), Value(torch.ones(6), "vector")]
    flows = [compressor.flow(v, compressor.init(v), 0) for v in values]
    asks: list[Ask] = []
    ends = drive(together(flows), lambda ask: asks.append(ask) or alone(ask))  # type: ignore[func-returns-value]
    assert [len(a.asks) for a in asks if isinstance(a, All)] == [2, 1]
    assert torch.equal(ends[1].mean, torch.ones(6))


@pytest.mark.parametrize("compressor", [exact(), topk(0.5), topk(1)], ids=repr)
def test_alone_i_am_told_my_own_message(compressor: Any) -> None:
    value = Value(torch.tensor([3.0, -1.0, 0.5, -4.0]), "w")
    end = drive(compressor.flow(value, None, 0), alone)
    assert torch.equal(end.mean, end.mine.dense())


def test_alone_several_asks_are_answered_one_by_one() -> None:
    one, two = torch.ones(2), torch.zeros(3)
    told = alone(All((Mean(one), Mean(two))))
    assert [t.shape for t in told] == [(2,), (3,)]


@pytest.mark.parametrize("ask", [Pair(1, ()), Push({})], ids=lambda a: type(a).__name__)
def test_alone_nobody_answers_what_needs_another(ask: Ask) -> None:
    with pytest.raises(UsageError, match=type(ask).__name__):
        alone(ask)


def test_alone_i_merge_nothing_and_leave_nothing_out() -> None:
    parts = (torch.ones(2),)
    assert alone(Fold(parts, lambda a, b: (a, b))) == Folded(parts, (), 1)


@pytest.mark.parametrize("workers", range(1, 18))
def test_the_tree_merges_everybody_once_into_worker_0(workers: int) -> None:
    held = {i: [i] for i in range(workers)}
    for taker, giver in tree(workers):
        held[taker] += held.pop(giver)
    assert {i: sorted(merged) for i, merged in held.items()} == {0: list(range(workers))}


def test_gathered_parts_are_added_into_something_like_the_value() -> None:
    def add(parts: tuple[torch.Tensor, ...], into: torch.Tensor, weight: float) -> None:
        into += weight * parts[0]

    like = torch.full((2, 2), 7.0)
    assert torch.equal(alone(Gather((torch.ones(2, 2),), add, like)), torch.ones(2, 2))
    assert torch.equal(like, torch.full((2, 2), 7.0))


def test_both_halves_of_a_sum_are_as_long_as_the_sum() -> None:
    x = torch.ones(6)
    assert nbytes(Scatter(x)) + nbytes(Spread(x)) == nbytes(Mean(x)) == 24
    assert nbytes(All((Scatter(x), Mean(x)))) == 36
