"""Memory follows its numbers: nothing that was kept is lost when messages change."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from shoal.axes.compression import Value, error_feedback, exact, topk
from shoal.axes.scheduling import Layer, Schedule, fifo, priority, wfbp
from shoal.runtime.step.buffers import FlatBuffers
from shoal.runtime.step.exchange import Exchange, reslice_states, span
from shoal.testing.lockstep import lockstep

SHAPES = {"w": (6, 7), "b": (7,), "scale": ()}
PLANS = [fifo(), wfbp(1), priority(64), priority(32), priority(2**20)]


class Kept(NamedTuple):
    """Memory as a compressor might keep it."""

    residual: Tensor
    count: int


def agreement(schedule: Schedule, *, strided: bool = False) -> Exchange:
    tensors = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    if strided:
        tensors["w"] = torch.zeros(7, 6, dtype=torch.float64).T
    return Exchange(FlatBuffers(tensors), schedule, error_feedback(topk(0.2)))


def play(agreements: list[Exchange], seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    for one in agreements:
        for place in one.flat.views.values():
            place.view.copy_(torch.randn(place.view.shape, generator=chance, dtype=torch.float64))
    lockstep([one.flows() for one in agreements])


def residual(one: Exchange) -> dict[str, Tensor]:
    """Of each parameter, as its numbers lie in memory."""
    views = {name: place.view for name, place in one.flat.views.items()}
    flat = {name: torch.zeros(view.numel(), dtype=torch.float64) for name, view in views.items()}
    for key, (kept, _) in one.states.items():
        name, start, stop = span(key, views)
        if kept.shape == views[name].shape:
            flat[name].as_strided(views[name].shape, views[name].stride()).copy_(kept)
        else:
            flat[name][start:stop] = kept.reshape(-1)
    return flat


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("after", PLANS, ids=repr)
@pytest.mark.parametrize("before", PLANS, ids=repr)
def test_residuals_survive_a_change_of_messages(
    before: Schedule, after: Schedule, strided: bool
) -> None:
    agreements = [agreement(before, strided=strided) for _ in range(2)]
    play(agreements, 0)
    for one in agreements:
        was = residual(one)
        assert any(bool(r.any()) for r in was.values())
        one.rebind(after, {}, lambda n: 1e-4 + n * 1e-9)
        one._reslice()
        assert set(one.states) == {key for task in one.buckets for key in task.keys}
        torch.testing.assert_close(residual(one), was, rtol=0, atol=0)
    play(agreements, 1)


def test_a_checkpoint_of_other_messages_is_taken_up() -> None:
    first = [agreement(priority(64)) for _ in range(2)]
    play(first, 0)
    second = [agreement(wfbp(1)) for _ in range(2)]
    for old, new in zip(first, second, strict=True):
        new.load_state_dict(old.state_dict())
        new._reslice()
        torch.testing.assert_close(residual(new), residual(old), rtol=0, atol=0)


def test_what_is_not_as_large_as_the_piece_comes_from_the_first() -> None:
    def init(value: Value) -> Kept:
        return Kept(torch.zeros(value.tensor.numel()), 0)

    views = {"w": torch.zeros(6)}
    states = {"w[0:2]": Kept(torch.ones(2), 5), "w[2:6]": Kept(torch.full((4,), 2.0), 5)}
    made = reslice_states(states, {"w": views["w"]}, views, init)
    assert made["w"].residual.tolist() == [1, 1, 2, 2, 2, 2]
    assert made["w"].count == 5
    assert isinstance(made["w"], Kept)


def test_dictionaries_are_memory_too_and_what_is_new_starts_fresh() -> None:
    def init(value: Value) -> dict[str, Tensor]:
        return {"m": torch.zeros_like(value.tensor)}

    views = {"w": torch.zeros(4), "new": torch.zeros(2)}
    pieces = {"w[0:2]": torch.zeros(2), "w[2:4]": torch.zeros(2), "new": torch.zeros(2)}
    made = reslice_states({"w": {"m": torch.arange(4.0)}}, pieces, views, init)
    assert made["w[2:4]"]["m"].tolist() == [2, 3]
    assert made["new"]["m"].tolist() == [0, 0]


def test_the_same_messages_are_not_bound_again() -> None:
    one = Exchange(FlatBuffers({"w": torch.zeros(4)}), wfbp(), exact())
    assert not one.rebind(wfbp(), {}, lambda n: 0.0)
    assert one.rebind(priority(16), {"w": Layer("w", 16, 1, 1)}, lambda n: 0.0) is False
    two = Exchange(FlatBuffers({"w": torch.zeros(8)}), wfbp(), exact())
    assert two.rebind(priority(16), {}, lambda n: 0.0)
    assert len(two.buckets) == 2
