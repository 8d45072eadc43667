"""Agree on named tensors: in place, by name, whatever the messages."""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.axes import AXES
from shoal.axes.compression import Compressor, Trait, cast, error_feedback, exact, powersgd, topk
from shoal.axes.scheduling import Schedule, dear, fifo, priority, wfbp
from shoal.flow import Ask
from shoal.runtime.step.buffers import FlatBuffers
from shoal.runtime.step.exchange import Exchange, typical
from shoal.testing.contracts import make, samples
from shoal.testing.contracts.require import same
from shoal.testing.lockstep import lockstep

SHAPES = {"embed": (9, 4), "w": (6, 7), "b": (7,), "scale": (), "none": (0, 3)}
COMPRESSORS = [make(text) for f in AXES["compression"] for text in samples(f)]
each_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)


def context(schedule: Schedule, compressor: Compressor, workers: int = 3) -> list[Exchange]:
    tensors = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    return [Exchange(FlatBuffers(tensors), schedule, compressor) for _ in range(workers)]


def fill(agreements: list[Exchange], seed: int) -> list[dict[str, Tensor]]:
    chance = torch.Generator().manual_seed(seed)
    given = []
    for agreement in agreements:
        for place in agreement.flat.views.values():
            place.view.copy_(torch.randn(place.view.shape, generator=chance, dtype=torch.float64))
        given.append(numbers(agreement))
    return given


def numbers(agreement: Exchange) -> dict[str, Tensor]:
    return {name: place.view.clone() for name, place in agreement.flat.views.items()}


def agree(agreements: list[Exchange]) -> None:
    lockstep([agreement.flows() for agreement in agreements])


@pytest.mark.parametrize("schedule", [fifo(), wfbp(200), priority(32), dear(64)], ids=repr)
def test_the_agreed_numbers_take_the_place_of_mine(schedule: Schedule) -> None:
    agreements = context(schedule, exact())
    given = fill(agreements, 0)
    agree(agreements)
    for agreement in agreements:
        for name, agreed in numbers(agreement).items():
            mean = torch.stack([g[name] for g in given]).mean(0)
            torch.testing.assert_close(agreed, mean)


@each_compressor
def test_messages_do_not_matter_where_no_tensor_is_cut(compressor: Compressor) -> None:
    ends = []
    for schedule in (fifo(), wfbp(1), fifo(100)):
        agreements = context(schedule, compressor)
        for seed in range(3):
            fill(agreements, seed)
            agree(agreements)
        ends.append(numbers(agreements[1]))
    narrow = Trait.ELEMENTWISE in compressor.traits and Trait.LOSSLESS not in compressor.traits
    for other in ends[1:]:
        for name, value in ends[0].items():
            torch.testing.assert_close(value, other[name], rtol=0, atol=0.02 if narrow else 0)


@pytest.mark.parametrize(
    ("compressor", "schedule"),
    [(c, wfbp(200)) for c in COMPRESSORS]
    + [(c, priority(64)) for c in COMPRESSORS if Trait.SLICEABLE in c.traits],
    ids=repr,
)
def test_it_goes_on_after_saving_as_if_nothing_had_been(
    compressor: Compressor, schedule: Schedule
) -> None:
    went, goes = context(schedule, compressor), context(schedule, compressor)
    for seed in range(2):
        fill(went, seed)
        agree(went)
    for old, new in zip(went, goes, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    assert goes[0].round == 2
    for agreements in (went, goes):
        fill(agreements, 2)
        agree(agreements)
    for old, new in zip(went, goes, strict=True):
        for name, value in numbers(old).items():
            assert torch.equal(value, numbers(new)[name])


def test_state_is_kept_by_parameter_so_other_buckets_keep_it() -> None:
    one, other = (
        context(wfbp(1), error_feedback(topk(0.25))),
        context(fifo(), error_feedback(topk(0.25))),
    )
    fill(one, 0)
    agree(one)
    for old, new in zip(one, other, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    for agreements in (one, other):
        fill(agreements, 1)
        agree(agreements)
    for name, value in numbers(one[0]).items():
        assert torch.equal(value, numbers(other[0])[name])


def test_what_remembers_nothing_saves_nothing() -> None:
    agreements = context(wfbp(), topk(0.25))
    fill(agreements, 0)
    agree(agreements)
    assert agreements[0].state_dict() == {"round": 1, "states": {}}


@pytest.mark.parametrize(
    "compressor",
    # what keeps the momentum, or clips, means something else than the gradient
    [c for c in COMPRESSORS if Trait.ONE_SHOT in c.traits and Trait.MOMENTUM not in c.traits],
    ids=repr,
)
def test_messages_for_a_server_add_up_to_what_i_meant_or_still_keep(compressor: Compressor) -> None:
    (agreement,) = context(fifo(), compressor, workers=1)
    (given,) = fill([agreement], 0)
    messages = agreement.messages()
    assert set(messages) == set(SHAPES)
    assert agreement.round == 1
    assert compressor.add is not None
    for name, parts in messages.items():
        into = torch.zeros(SHAPES[name], dtype=torch.float64)
        compressor.add(parts, into, 1.0)
        if Trait.CONSERVING in compressor.traits:
            into += agreement.states[name][0]
        if compressor.traits & (Trait.CONSERVING | Trait.LOSSLESS):
            torch.testing.assert_close(into, given[name])
        if compressor.traits & (Trait.CONTRACTIVE | Trait.CONSERVING):
            assert (into - given[name]).norm() <= given[name].norm()


def test_messages_are_mine_even_after_my_numbers_change() -> None:
    (agreement,) = context(fifo(), exact(), workers=1)
    fill([agreement], 0)
    sent = agreement.messages()
    before = sent["w"][0].clone()
    fill([agreement], 1)
    assert torch.equal(sent["w"][0], before)


@pytest.mark.parametrize("compressor", [exact(), cast(), topk(0.25), error_feedback(topk(0.25))])
def test_complex_tensors_keep_their_imaginary_part(compressor: Compressor) -> None:
    flats = FlatBuffers({"w": torch.zeros(4, dtype=torch.complex128)})
    agreement = Exchange(flats, fifo(), compressor)
    flats.views["w"].view.fill_(3j)
    (part, *_) = reversed(agreement.messages()["w"])
    assert part.dtype.is_complex is False
    assert part.abs().max() == 3


def test_powersgd_asks_twice_for_a_whole_bucket() -> None:
    agreements = context(fifo(), powersgd(1), workers=2)
    fill(agreements, 0)
    flow = agreements[0].flow(0)
    widths = []
    ask = next(flow)
    while True:
        widths.append(len(ask.asks))  # type: ignore[union-attr]
        try:
            ask = flow.send(tuple(one.tensor for one in ask.asks))  # type: ignore[union-attr]
        except StopIteration:
            break
    assert widths == [len(SHAPES), 2]


def test_a_longer_message_takes_longer() -> None:
    assert typical(0) < typical(1000) < typical(10**9)


def without_end(agreement: Exchange) -> Generator[Ask, Any, None]:
    """A round that will be forgotten."""
    for index in range(len(agreement.buckets)):
        yield from agreement.flow(index)


@each_compressor
def test_a_round_that_is_forgotten_leaves_no_trace(compressor: Compressor) -> None:
    disturbed, calm = (context(wfbp(200), compressor) for _ in range(2))
    for seed in range(4):
        for agreements in (disturbed, calm):
            fill(agreements, seed)
            agree(agreements)
        fill(disturbed, 99)
        disturbed[0].flat.views["w"].view[0, 0] = float("nan")
        lockstep([without_end(agreement) for agreement in disturbed])
        for agreement in disturbed:
            agreement.revert()
    fill(disturbed, 4)
    fill(calm, 4)
    agree(disturbed)
    agree(calm)
    for one, other in zip(disturbed, calm, strict=True):
        assert same(numbers(one), numbers(other))
