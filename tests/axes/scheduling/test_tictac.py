"""What forward needs first comes back first."""

from __future__ import annotations

import pytest

from shoal.axes.scheduling import Event, Layer, tictac
from shoal.errors import BadArgument
from shoal.simulate.schedule import schedule_seconds

LAYERS = [Layer(f"l{i}", 32, 1.0, 1.0) for i in range(4)]
MB = 2**20


def test_tic_pulls_in_forward_order_after_backward() -> None:
    plan = tictac("tic").plan(LAYERS, lambda n: 5.0)
    assert [task.slices[0].layer for task in plan] == [0, 1, 2, 3]
    assert {task.ready for task in plan} == {Event("backward", 0)}
    assert tictac("tic").measures == "nothing"


def test_tac_pulls_the_earliest_of_those_that_are_ready() -> None:
    plan = tictac("tac").plan(LAYERS, lambda n: 2.0)
    assert [task.slices[0].layer for task in plan] == [3, 1, 0, 2]
    assert [task.due for task in plan] == [Event("forward", i) for i in (3, 1, 0, 2)]
    assert tictac().measures == "times"


def test_either_lets_forward_start_before_all_is_there() -> None:
    for order in ("tic", "tac"):
        tasks = tictac(order).plan(LAYERS, lambda n: 2.0)
        spans = schedule_seconds(tasks, LAYERS, lambda n: 2.0).spans
        first = next(s for s in spans if s.name == "forward l0")
        assert first.start < max(s.end for s in spans if s.lane == "exchange")


def test_what_is_larger_than_a_shard_is_cut() -> None:
    plan = tictac("tic").plan([Layer("a", 9 * MB)], lambda n: 1.0)
    assert [task.nbytes // MB for task in plan] == [4, 4, 1]


def test_there_are_two_orders() -> None:
    with pytest.raises(BadArgument, match="tac or tic"):
        tictac("toe")
