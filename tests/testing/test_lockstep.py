"""The harness itself: it answers as a wire would, and says when workers do not match."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from shoal.axes.compression import Value
from shoal.flow import All, Ask, Fold, Gather, Mean, Pair
from shoal.testing.contracts import make
from shoal.testing.contracts.require import same
from shoal.testing.lockstep import lockstep


def means(*tensors: torch.Tensor) -> Generator[Ask, Any, list[torch.Tensor]]:
    told = []
    for tensor in tensors:
        told.append((yield Mean(tensor)))
    return told


def once(ask: Ask) -> Generator[Ask, Any, Any]:
    told = yield ask
    return told


def test_everyone_is_told_the_mean() -> None:
    ends = lockstep([means(torch.tensor(float(i)), torch.tensor(i * 10.0)) for i in range(3)])
    assert [[float(t) for t in end] for end in ends] == [[1, 10]] * 3


def test_a_matrix_gives_each_its_own_row() -> None:
    w = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
    ends = lockstep([once(Mean(torch.tensor(x))) for x in (0.0, 4.0)], w)
    assert [float(end) for end in ends] == [0, 3]


def test_what_was_asked_is_not_overwritten() -> None:
    mine = torch.ones(2)
    lockstep([once(Mean(mine)), once(Mean(torch.zeros(2)))])
    assert torch.equal(mine, torch.ones(2))


def test_gathered_parts_are_added_with_their_weight() -> None:
    def add(parts: tuple[torch.Tensor, ...], into: torch.Tensor, weight: float) -> None:
        into[int(parts[0])] += weight

    like = torch.zeros(3)
    ends = lockstep([once(Gather((torch.tensor(i),), add, like)) for i in (0, 2)])
    assert [end.tolist() for end in ends] == [[0.5, 0, 0.5]] * 2


def test_folded_parts_are_merged_up_a_tree_and_who_merged_is_told_what_was_left_out() -> None:
    def larger(mine: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> Any:
        return (mine, theirs) if float(mine[0]) >= float(theirs[0]) else (theirs, mine)

    ends = lockstep([once(Fold((torch.tensor(x),), larger)) for x in (1.0, 4.0, 3.0, 2.0, 0.5)])
    assert [float(end.parts[0]) for end in ends] == [4] * 5
    dropped = [[float(part) for (part,) in end.dropped] for end in ends]
    assert dropped == [[1, 3, 0.5], [], [2], [], []]
    assert {end.workers for end in ends} == {5}


def test_several_asks_in_one_are_answered_each() -> None:
    asks = [All((Mean(torch.tensor(x)), Mean(torch.tensor(-x)))) for x in (1.0, 3.0)]
    ends = lockstep([once(ask) for ask in asks])
    assert [tuple(map(float, end)) for end in ends] == [(2, -2)] * 2


def test_workers_that_ask_different_things_are_found() -> None:
    gather = Gather((), lambda parts, into, weight: None, torch.zeros(1))
    with pytest.raises(AssertionError, match="yield different asks: \\['Gather', 'Mean'\\]"):
        lockstep([once(Mean(torch.zeros(1))), once(gather)])


def test_a_worker_that_ends_before_the_others_is_found() -> None:
    with pytest.raises(AssertionError, match="1 workers ended, but 1 yielded another ask"):
        lockstep([means(torch.zeros(1)), means()])


def test_what_needs_a_race_is_not_answered() -> None:
    with pytest.raises(AssertionError, match="cannot answer Pair"):
        lockstep([once(Pair(0, ()))])


def test_nobody_gets_nothing() -> None:
    assert lockstep([means(), means()]) == [[], []]


@pytest.mark.parametrize("text", ["exact", "error_feedback(topk(0.25))", "qsgd(4)", "gtopk(0.5)"])
def test_answers_worked_out_once_are_those_that_every_worker_works_out(text: str) -> None:
    compressor, values = make(text), torch.randn(3, 5, 4, dtype=torch.float64)
    ends = []
    for shared in (False, True):
        given = [Value(value.clone(), "w") for value in values]
        flows = [compressor.flow(v, compressor.init(v), 0) for v in given]
        ends.append(lockstep(flows, once=shared))
    assert same(*ends)
    first, second, *_ = ends[1]
    assert first.mean.data_ptr() != second.mean.data_ptr()
