"""What changes most goes first, as soon as it is ready."""

from __future__ import annotations

import pytest

from shoal.axes.scheduling import Event, Layer, magnitude
from shoal.errors import BadArgument


def order(changes: list[float], seconds: float, size: int = 64) -> list[int]:
    layers = [Layer(f"l{i}", 32, 1, 1, change) for i, change in enumerate(changes)]
    plan = magnitude(size).plan(layers, lambda n: seconds)
    assert {task.due for task in plan} == {Event("update")}
    return [task.slices[0].layer for task in plan]


def test_while_the_link_is_busy_the_largest_change_overtakes() -> None:
    assert order([0.1, 0.9, 0.5, 0.2], seconds=10.0) == [3, 1, 2, 0]


def test_on_a_free_link_nothing_waits_for_what_is_larger() -> None:
    assert order([0.1, 0.9, 0.5, 0.2], seconds=0.0) == [3, 2, 1, 0]


def test_with_nothing_known_the_first_layers_go_first() -> None:
    assert order([0.0] * 4, seconds=10.0) == [3, 0, 1, 2]


def test_slices_of_one_parameter_stay_together() -> None:
    assert order([0.1, 0.9, 0.5], seconds=10.0, size=16) == [2, 1, 1, 2, 0, 0]


def test_it_asks_for_changes_as_often_as_it_is_told() -> None:
    assert magnitude(256, 3).every == 3
    assert magnitude().measures == "changes"
    assert [repr(magnitude(256)), repr(magnitude(2**20, 3))] == [
        "magnitude(256)",
        "magnitude(1MB, 3)",
    ]


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_a_look_is_due_after_whole_steps(every: object) -> None:
    with pytest.raises(BadArgument, match="whole number"):
        magnitude(256, every)  # type: ignore[arg-type]
