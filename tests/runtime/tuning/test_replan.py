"""How much steps change parameters, noted when it is time."""

from __future__ import annotations

import pytest
import torch

from shoal.runtime.tuning.replan import ParameterChanges


@pytest.mark.parametrize("every", [1, 2, 4])
def test_a_change_is_that_of_the_step_before(every: int) -> None:
    parameters = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2), "c": torch.ones(3)}
    changes = ParameterChanges(parameters, every)
    for step in range(9):
        changes.record(step)
        if step and (step + 1) % every == 0:
            assert changes.relative == pytest.approx([0.5, 0.0, 0.0], rel=1e-6)
        before = parameters["a"].clone()
        parameters["a"].mul_(2)  # |update| is half of what it becomes
        assert float(before.norm()) > 0


def test_a_moment_is_noted_once() -> None:
    parameters = {"a": torch.tensor([1.0])}
    changes = ParameterChanges(parameters, 1)
    changes.record(0)
    parameters["a"].fill_(2.0)
    changes.record(1)
    first = list(changes.relative)
    changes.record(1)
    assert changes.relative == first == [0.5]


def test_what_was_zero_and_moved_changed_as_a_whole() -> None:
    parameters = {"a": torch.ones(1)}
    changes = ParameterChanges(parameters, 1)
    changes.record(0)
    parameters["a"].zero_()
    changes.record(1)
    assert changes.relative == [1.0]
