"""Two halves of a sum: one hides behind backward, the other behind the next forward."""

from __future__ import annotations

import pytest

from shoal.axes.scheduling import Event, Layer, Task, dear, wfbp
from shoal.errors import ConflictError
from shoal.simulate.schedule import schedule_seconds
from shoal.strategy import parse

LAYERS = [Layer(f"l{i}", 64, 1.0, 1.0) for i in range(4)]


def phases(tasks: tuple[Task, ...], phase: str) -> list[tuple[int, ...]]:
    return [tuple(s.layer for s in task.slices) for task in tasks if task.phase == phase]


def test_sums_are_scattered_as_backward_goes_and_gathered_as_forward_needs_them() -> None:
    tasks = dear(64).plan(LAYERS, lambda n: 1.0)
    assert phases(tasks, "scatter") == [(3,), (2,), (1,), (0,)]
    assert phases(tasks, "gather") == [(0,), (1,), (2,), (3,)]
    assert [task.ready for task in tasks[:4]] == [Event("backward", i) for i in (3, 2, 1, 0)]
    assert [task.due for task in tasks[4:]] == [Event("forward", i) for i in (0, 1, 2, 3)]


def test_small_tensors_are_fused_and_large_ones_cut() -> None:
    layers = [Layer("a", 200), Layer("b", 32), Layer("c", 32)]
    tasks = dear(64).plan(layers, lambda n: 1.0)
    assert phases(tasks, "scatter") == [(2, 1), (0,), (0,), (0,), (0,)]
    gathered = [t.slices[0].start for t in tasks if t.phase == "gather" and t.slices[0].layer == 0]
    assert gathered == [0, 64, 128, 192]


def test_a_step_hides_one_half_behind_each_pass() -> None:
    """A sum takes 2 s: wfbp's last ends 4 s after backward; dear has half of that left by then."""
    seconds = schedule_seconds(dear(64).plan(LAYERS, two), LAYERS, two).seconds
    assert seconds == 4 + 1 + 4 + 1  # the last half of each pass shows, and nothing else
    assert seconds < schedule_seconds(wfbp(1).plan(LAYERS, two), LAYERS, two).seconds


def two(nbytes: int) -> float:
    return 2.0


@pytest.mark.parametrize("other", ["topk(0.1)", "powersgd(2)", "ring", "parameter_server"])
def test_only_sums_between_workers_are_scattered(other: str) -> None:
    with pytest.raises(ConflictError, match="dear"):
        parse(f"dear, {other}")


def test_what_casts_numbers_is_still_a_sum() -> None:
    assert parse("dear, cast(bfloat16)").scheduling == dear()
