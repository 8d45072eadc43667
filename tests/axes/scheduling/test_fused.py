"""Fusion buffers, worked out by hand."""

from __future__ import annotations

import pytest

from shoal.axes.scheduling import Event, Layer, fused
from shoal.errors import BadArgument


def sent(threshold: int, *sizes: int) -> list[list[int]]:
    plan = fused(threshold).plan([Layer(f"l{i}", n) for i, n in enumerate(sizes)], lambda n: 0.0)
    return [[piece.layer for piece in task.slices] for task in plan]


def test_a_buffer_never_holds_more_than_the_threshold() -> None:
    assert sent(8, 4, 4, 4, 4, 4) == [[4, 3], [2, 1], [0]]
    assert sent(11, 4, 4, 4, 4, 4) == [[4, 3], [2, 1], [0]]


def test_a_tensor_that_is_larger_goes_alone() -> None:
    assert sent(8, 4, 100, 4) == [[2], [1], [0]]


def test_there_is_no_small_first_buffer() -> None:
    mb = 2**20
    assert sent(64 * mb, mb, mb, mb) == [[2, 1, 0]]


def test_a_buffer_leaves_when_its_earliest_layer_is_done() -> None:
    plan = fused(8).plan([Layer(f"l{i}", 4) for i in range(4)], lambda n: 0.0)
    assert [task.ready for task in plan] == [Event("backward", 2), Event("backward", 0)]


@pytest.mark.parametrize("threshold", [0, -1, True, 1.5, "4KB"])
def test_a_threshold_is_a_size(threshold: object) -> None:
    with pytest.raises(BadArgument, match="whole number of bytes"):
        fused(threshold)  # type: ignore[arg-type]
