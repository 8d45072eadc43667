"""Where numbers live: one range a task, views that look like the tensors, nothing left out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.axes.scheduling import Event, Schedule, Slice, Task, fifo, priority, wfbp
from shoal.runtime.step.buffers import FlatBuffers, real
from shoal.runtime.step.exchange import typical

SCHEDULES = [fifo(), fifo(1), wfbp(64), wfbp(1), priority(16), priority(64)]
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64])
tensors = st.lists(st.tuples(shapes, dtypes), max_size=6).map(
    lambda made: {f"p{i}": torch.zeros(s, dtype=d) for i, (s, d) in enumerate(made)}
)


def named(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


@given(tensors)
@settings(deadline=None)
def test_views_look_like_what_they_stand_for_and_do_not_overlap(tensors: dict[str, Tensor]) -> None:
    flats = FlatBuffers(tensors)
    for i, name in enumerate(tensors):
        flats.views[name].view.fill_(i + 1)
    for i, (name, tensor) in enumerate(tensors.items()):
        view = flats.views[name].view
        assert (view.shape, view.dtype, view.stride()) == (
            tensor.shape,
            tensor.dtype,
            tensor.stride(),
        )
        assert bool((view == i + 1).all())
    assert flats.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())


@given(tensors, st.sampled_from(SCHEDULES))
@settings(deadline=None)
def test_tasks_hold_every_number_once(tensors: dict[str, Tensor], schedule: Schedule) -> None:
    flats = FlatBuffers(tensors)
    bound = flats.bind(schedule, typical)
    for task in bound:
        task.whole.add_(1)
        assert task.whole.numel() == sum(p.numel() for p in task.pieces)
    for buffer in flats.storage.values():
        assert bool((buffer == 1).all())
    for task in bound:
        for piece in task.pieces:
            piece.add_(1)
    for buffer in flats.storage.values():
        assert bool((buffer == 2).all())
    keys = [key for task in bound for key in task.keys]
    assert len(keys) == len(set(keys))
    assert {name for task in bound for name in task.names} == set(tensors)


def test_tensors_lie_in_the_order_in_which_backward_meets_them() -> None:
    flats = FlatBuffers(named(first=(2,), second=(3,), third=(4,)))
    starts = {name: place.start for name, place in flats.views.items()}
    assert starts == {"third": 0, "second": 4, "first": 7}


@pytest.mark.parametrize(
    "like",
    [
        torch.zeros(5, 4).T,
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.zeros(2, 3, 4).permute(2, 0, 1),
    ],
    ids=["transposed", "channels-last", "permuted"],
)
def test_dense_strides_are_kept(like: Tensor) -> None:
    flats = FlatBuffers({"a": torch.zeros(3), "w": like, "b": torch.zeros(2)})
    view = flats.views["w"].view
    assert view.shape == like.shape
    assert view.stride() == like.stride()
    view.copy_(torch.arange(like.numel()).view(like.shape))
    assert flats.storage[torch.float32, torch.device("cpu")].sum() == sum(range(like.numel()))


@pytest.mark.parametrize("like", [torch.zeros(1).expand(4), torch.zeros(8)[::2]])
def test_strides_that_are_not_dense_become_plain(like: Tensor) -> None:
    assert FlatBuffers({"w": like}).views["w"].view.is_contiguous()


def test_a_complex_number_travels_as_two_real_ones() -> None:
    flats = FlatBuffers({"w": torch.zeros(3, 2, dtype=torch.complex64)})
    (task,) = flats.bind(fifo(), typical)
    flats.views["w"].view.fill_(1 + 2j)
    assert task.pieces[0].shape == (3, 2, 2)
    assert task.whole.tolist() == [1, 2] * 6
    assert real(torch.zeros(2)).shape == (2,)


def test_types_travel_apart_in_the_order_of_backward() -> None:
    tensors = {
        "a": torch.zeros(4),
        "b": torch.zeros(4, dtype=torch.float64),
        "c": torch.zeros(4),
    }
    bound = FlatBuffers(tensors).bind(wfbp(1), typical)
    assert [task.names for task in bound] == [("c",), ("b",), ("a",)]


def test_pieces_of_a_cut_tensor_are_named_by_their_range() -> None:
    (task, *rest) = FlatBuffers(named(w=(10,))).bind(priority(16), typical)
    assert [t.keys for t in (task, *rest)] == [("w[0:4]",), ("w[4:8]",), ("w[8:10]",)]


def test_the_order_is_the_same_on_every_rank() -> None:
    shapes = {"a": (64, 4), "b": (4,), "c": (9, 9)}
    one, two = (
        [t.keys for t in FlatBuffers(named(**shapes)).bind(priority(64), typical)] for _ in range(2)
    )
    assert one == two


def test_a_task_that_is_not_one_range_is_refused() -> None:
    def plan(layers: object, cost: object) -> tuple[Task, ...]:
        ends = (Slice(2, 0, 8), Slice(0, 0, 8))
        return (Task(ends, "reduce", Event("backward", 0), Event("update")),)

    with pytest.raises(ValueError, match="are not one range"):
        FlatBuffers(named(a=(2,), b=(2,), c=(2,))).bind(Schedule("odd", plan), typical)


def test_nothing_to_hold_is_no_task() -> None:
    assert FlatBuffers({}).bind(wfbp(), typical) == ()
