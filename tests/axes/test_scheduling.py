"""Plans worked out by hand, and the laws of all plans on layers nobody thought of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.axes import AXES
from shoal.axes.scheduling import Event, Layer, Schedule, Slice, fifo, priority, wfbp
from shoal.errors import BadArgument
from shoal.testing.contracts import make, samples
from shoal.testing.contracts.scheduling import check_plan

MB = 2**20
ALL = [make(text) for f in AXES["scheduling"] for text in samples(f)]

seconds = st.floats(0, 1e-2)
layers = st.lists(
    st.builds(Layer, st.just("l"), st.integers(0, 5000).map(lambda n: 4 * n), seconds, seconds),
    max_size=12,
)


@given(layers, st.sampled_from(ALL))
@settings(deadline=None, max_examples=60)
def test_every_schedule_keeps_the_laws_of_plans(layers: list[Layer], schedule: Schedule) -> None:
    check_plan(schedule, layers)


@given(layers, st.integers(1, 30_000), st.sampled_from([fifo, wfbp]))
@settings(deadline=None, max_examples=60)
def test_a_message_is_full_only_with_its_last_tensor(
    layers: list[Layer], size: int, schedule: Callable[[int], Schedule]
) -> None:
    for task in schedule(size).plan(layers, free):
        without_last = task.nbytes - layers[task.slices[-1].layer].nbytes
        assert without_last < size


def free(nbytes: int) -> float:
    return 0.0


def sent(schedule: Schedule, *sizes: int) -> list[list[int]]:
    plan = schedule.plan([Layer(f"l{i}", n) for i, n in enumerate(sizes)], free)
    return [[piece.layer for piece in task.slices] for task in plan]


def test_fifo_sends_all_at_once_after_backward() -> None:
    plan = fifo().plan([Layer("a", 4), Layer("b", 8)], free)
    assert len(plan) == 1
    assert plan[0].ready == Event("backward", 0)
    assert plan[0].due == Event("update")
    assert plan[0].nbytes == 12


def test_fusion_of_one_byte_sends_every_tensor_on_its_own() -> None:
    assert sent(fifo(1), 4, 8, 12) == sent(wfbp(1), 4, 8, 12) == [[2], [1], [0]]


def test_wfbp_starts_with_a_small_message_and_then_fills_buckets() -> None:
    assert sent(wfbp(4 * MB), 3 * MB, 3 * MB, 2 * MB, MB) == [[3], [2, 1], [0]]


def test_wfbp_sends_a_bucket_when_the_earliest_of_its_layers_is_done() -> None:
    plan = wfbp(4 * MB).plan([Layer("l", n * MB) for n in (3, 3, 2, 1)], free)
    assert [task.ready.layer for task in plan] == [3, 1, 0]


def test_priority_sends_what_the_next_forward_needs_first() -> None:
    """Backward of a layer takes 1 s; a slice of 16 bytes takes 1 s on the link.

    t=1: layer 2 done, its slices wait: 2a goes. t=2: layer 1 done: 1a goes before 2b. t=3: layer 0
    done: 0a, 0b, then the rest of 1, then of 2.
    """
    layers = [Layer(name, 32, 1, 1) for name in "abc"]
    plan = priority(16).plan(layers, lambda nbytes: nbytes / 16)
    assert [(t.slices[0].layer, t.slices[0].start) for t in plan] == [
        (2, 0), (1, 0), (0, 0), (0, 16), (1, 16), (2, 16),
    ]  # fmt: skip
    assert [t.ready for t in plan[:3]] == [Event("backward", i) for i in (2, 1, 0)]
    assert [t.due for t in plan[:3]] == [Event("forward", i) for i in (2, 1, 0)]


def test_priority_on_a_fast_link_sends_as_backward_goes() -> None:
    plan = priority(16).plan([Layer(name, 32, 1, 1) for name in "abc"], free)
    assert [t.slices[0].layer for t in plan] == [2, 2, 1, 1, 0, 0]


def test_priority_on_a_slow_link_lets_the_first_layer_overtake() -> None:
    plan = priority(16).plan([Layer(name, 48, 1, 1) for name in "abc"], lambda nbytes: 10.0)
    assert [t.slices[0].layer for t in plan] == [2, 0, 0, 0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize(("credit", "order"), [(16, [2, 0, 1]), (32, [2, 1, 0]), (48, [2, 1, 0])])
def test_what_is_under_way_by_credit_is_not_overtaken(credit: int, order: list[int]) -> None:
    """Backward of a layer takes 1 s, a message 10 s: with room for two, the second leaves at 2."""
    layers = [Layer(name, 16, 1, 1) for name in "abc"]
    plan = priority(16, credit=credit).plan(layers, lambda nbytes: 10.0)
    assert [task.slices[0].layer for task in plan] == order


def test_small_neighbours_share_a_slice() -> None:
    plan = priority(64).plan([Layer(name, 16, 1, 1) for name in "abcdef"], free)
    assert [[piece.layer for piece in task.slices] for task in plan] == [[5, 4, 3, 2], [1, 0]]


def test_a_bias_rides_with_the_matrix_that_just_fills_a_message() -> None:
    layers = [Layer(f"{kind}{n}", size) for n in range(4) for kind, size in (("w", 64), ("b", 4))]
    plan = priority(64).plan(layers, free)
    assert len(plan) == 4
    assert all(task.nbytes <= 64 + 64 // 16 for task in plan)
    assert sorted(s.layer for task in plan for s in task.slices) == list(range(8))


def test_what_is_longer_than_a_message_by_less_than_another_is_not_cut() -> None:
    assert len(priority(64).plan([Layer("a", 68)], free)) == 1
    assert len(priority(64).plan([Layer("a", 69)], free)) == 2


@pytest.mark.parametrize("credit", [8, -1, 0.5, True])
def test_a_credit_of_less_than_a_slice_is_refused(credit: float) -> None:
    with pytest.raises(BadArgument):
        priority(16, credit=credit)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 15, 16, 17, 31])
def test_priority_cuts_between_whole_numbers(size: int) -> None:
    (first, *_) = priority(size).plan([Layer("a", 40)], free)
    assert first.slices == (Slice(0, 0, 16),)
