"""It fuses where messages cost, cuts where bytes do, and tells both in one plan."""

from __future__ import annotations

import pytest

from shoal.axes.scheduling import Event, Layer, Task, adaptive, fused, priority, wfbp
from shoal.axes.scheduling.adaptive import price

MB = 2**20
# a small convolutional net: many small tensors, then one that dwarfs them
LAYERS = [Layer(f"l{i}", n, 5e-4, 1e-3) for i, n in enumerate((4096,) * 20 + (16 * MB, 4096))]


def slow_start(nbytes: int) -> float:
    return 5e-3 + nbytes * 1e-10


def slow_bytes(nbytes: int) -> float:
    return 1e-6 + nbytes * 5e-9


def pieces(tasks: tuple[Task, ...]) -> tuple[int, int]:
    """Messages of several tensors; messages of a part of one."""
    many = sum(len(task.slices) > 1 for task in tasks)
    parts = [s for t in tasks for s in t.slices if s.stop - s.start < LAYERS[s.layer].nbytes]
    return many, len(parts)


def test_on_a_link_of_high_latency_it_fuses_and_cuts_nothing() -> None:
    tasks = adaptive().plan(LAYERS, slow_start)
    fused_messages, cut = pieces(tasks)
    assert fused_messages >= 1
    assert cut == 0
    assert len(tasks) < len(LAYERS) / 2


def test_on_a_link_of_low_latency_it_cuts_what_is_large() -> None:
    tasks = adaptive().plan(LAYERS, slow_bytes)
    _, cut = pieces(tasks)
    assert cut > 1
    assert {s.layer for t in tasks for s in t.slices if s.stop - s.start < 4096} == set()
    first = next(t for t in tasks if t.slices[-1].layer == 0)
    assert tasks.index(first) < len(tasks) - 1, "the first layer overtakes"


@pytest.mark.parametrize("cost", [slow_start, slow_bytes])
@pytest.mark.parametrize("early", [True, False])
def test_by_the_model_nothing_that_is_fixed_is_faster(cost, early: bool) -> None:  # type: ignore[no-untyped-def]
    chosen = price(adaptive(early), LAYERS, cost)
    rivals = [wfbp(), wfbp(1), fused(), fused(4 * MB), *([priority(4 * MB)] if early else [])]
    assert chosen <= min(price(rival, LAYERS, cost) for rival in rivals) * 1.03


def test_contenders_are_one_of_each_kind_and_what_everybody_does() -> None:
    offered = adaptive().contenders
    assert offered is not None
    found = offered(LAYERS, slow_bytes)
    assert [s.slices for s in found].count(True) == 1
    assert {"wfbp", "wfbp(4MB)"} <= {s.name for s in found}
    prices = [price(s, LAYERS, slow_bytes) for s in found[:2]]
    assert prices == sorted(prices)


def test_without_early_forwards_nothing_is_cut_and_all_is_due_at_the_update() -> None:
    schedule = adaptive(early=False)
    assert not schedule.slices
    assert not schedule.early
    tasks = schedule.plan(LAYERS, slow_bytes)
    assert pieces(tasks)[1] == 0
    assert {task.due for task in tasks} == {Event("update")}


def test_a_plan_of_very_many_messages_is_not_even_priced() -> None:
    huge = [Layer("l", 2**31, 1e-3, 1e-3)]
    assert price(priority(2**16), huge, slow_bytes) == float("inf")
    assert adaptive().plan(huge, slow_bytes)
