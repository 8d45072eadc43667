"""What a worker does in a step: which mode, and that each goes on after saving."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.flow import Pair, Push, alone, drive
from shoal.runtime.step.modes import Mode
from shoal.runtime.step.modes.local import LocalMode
from shoal.runtime.step.modes.mixing import MixingMode
from shoal.runtime.step.modes.pairs import PairsMode
from shoal.runtime.step.modes.push import PushMode
from shoal.runtime.step.modes.sequential import SequentialGradients
from shoal.strategy import parse
from shoal.testing.trainer import (
    LockstepTrainer,
    LockstepWorker,
    digits,
    lockstep_context,
    tiny,
)

MODES = {
    "bsp": SequentialGradients,
    "local(1), powersgd(2)": SequentialGradients,
    "ssp(0)": SequentialGradients,
    "parameter_server": SequentialGradients,
    "priority(64), error_feedback(topk(0.25))": SequentialGradients,
    "error_feedback(powersgd(1))": SequentialGradients,
    "local(3)": LocalMode,
    "local(3), error_feedback(topk(0.25))": LocalMode,
    "parameter_server, local(2), error_feedback(powersgd(1))": LocalMode,
    "bmuf": LocalMode,
    "bmuf(0.5), local(3), error_feedback(topk(0.25))": LocalMode,
    "gossip": MixingMode,
    "gossip, local(3)": MixingMode,
    "gossip, asp": PairsMode,
    "parameter_server, asp": PushMode,
    "parameter_server, ssp(2), error_feedback(topk(0.25))": PushMode,
}
each_strategy = pytest.mark.parametrize("text", MODES)


def parameters() -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(0)
    return {
        "w": nn.Parameter(torch.randn(6, 5, generator=chance, dtype=torch.float64)),
        "b": nn.Parameter(torch.randn(5, generator=chance, dtype=torch.float64)),
    }


def seated(text: str, held: dict[str, Tensor], workers: int = 3, worker: int = 1) -> Mode:
    """The mode of one worker whose gradients are a tenth of its parameters."""
    model = nn.ParameterDict(held)
    for p in model.parameters():
        p.grad = p.detach() * 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context = lockstep_context(parse(text), worker, workers)
    return LockstepWorker.build(model, optimizer, context).mode


@each_strategy
def test_the_facts_of_a_strategy_choose_its_mode(text: str) -> None:
    mode = seated(text, parameters())
    assert type(mode) is MODES[text]
    assert mode.agrees == (type(mode) is SequentialGradients)


@each_strategy
def test_due_comes_once_a_period(text: str) -> None:
    strategy = parse(text)
    school = LockstepTrainer(strategy, workers=2, build=tiny)
    mode, due = school.workers[0].mode, []
    if not strategy.synchrony.waits:
        assert not mode.due()
        return
    for _ in range(6):
        due.append(mode.due())
        school.step(digits(8)[0])
    period = strategy.synchrony.period
    assert due == [(k + 1) % period == 0 for k in range(6)]


def test_block_momentum_carries_on_what_blocks_changed() -> None:
    held = parameters()
    start = {name: p.detach().clone() for name, p in held.items()}
    mode = seated("bmuf(0.5, 0.8), local(2)", held)

    def apply() -> None:
        with torch.no_grad():
            for p in held.values():
                p += 1.0

    moved = []
    for step in range(6):
        drive(mode.closing(apply), alone)
        if step % 2:
            moved.append(float((held["w"] - start["w"]).detach().mean()))
    first = 0.8 * 2  # of the first block's two steps of 1
    second = 0.5 * first + 0.8 * 2
    third = 0.5 * second + 0.8 * 2
    assert moved == pytest.approx([first, first + second, first + second + third])


def test_block_momentum_is_forgotten_with_the_rest_and_means_nothing_alone() -> None:
    mode = seated("bmuf(0.5), local(2)", parameters())
    assert isinstance(mode, LocalMode)
    for move in mode.moves.values():
        move.fill_(3.0)
    mode.load_state_dict({})
    assert not any(move.any() for move in mode.moves.values())
    only = seated("bmuf(0.5, 0.8), local(2)", parameters(), workers=1, worker=0)
    assert isinstance(only, LocalMode)
    assert not only.moves


def test_block_momentum_grows_with_the_number_of_workers() -> None:
    outer = parse("bmuf, local(2)").coordination.outer
    assert outer is not None
    assert [outer.momentum_of(n) for n in (1, 2, 4)] == [0.0, 0.5, 0.75]


def snapshot(school: LockstepTrainer) -> list[Any]:
    return copy.deepcopy([(f.model.state_dict(), f.mode.state_dict()) for f in school.workers])


@pytest.mark.parametrize("text", [t for t in MODES if parse(t).synchrony.waits])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_goes_on_after_saving_as_if_nothing_had_been(text: str, steps: int) -> None:
    batches = digits(10, batches=6)
    went, goes = (LockstepTrainer(parse(text), workers=2, build=tiny) for _ in range(2))
    for batch in batches[:steps]:
        went.step(batch)
    for worker, (model, mode) in zip(goes.workers, snapshot(went), strict=True):
        worker.model.load_state_dict(model)
        worker.mode.load_state_dict(mode)
    for batch in batches[steps:]:
        assert went.step(batch) == goes.step(batch)
    for worker in range(2):
        for name, p in went.parameters(worker).items():
            assert torch.equal(p, goes.parameters(worker)[name])


def test_a_pusher_sends_the_gradient_and_takes_the_servers_model() -> None:
    held = parameters()
    mode = seated("parameter_server, asp", held)
    wanted = {name: p.detach() * 0.1 for name, p in held.items()}

    def step_on_nothing() -> None:
        assert all(p.grad is None for p in held.values())

    asks = mode.closing(step_on_nothing)
    ask = next(asks)
    assert isinstance(ask, Push)
    for name, (part,) in ask.parts.items():
        assert torch.equal(part, wanted[name])
    with pytest.raises(StopIteration):
        asks.send({name: torch.zeros_like(p) for name, p in held.items()})
    assert not any(p.any() for p in held.values())


def test_a_pushers_residual_survives_saving() -> None:
    text = "parameter_server, asp, error_feedback(topk(0.25))"
    held = parameters()
    went, goes = seated(text, held), seated(text, held)

    def push(mode: Mode) -> dict[str, tuple[Tensor, ...]]:
        ask = next(mode.closing(lambda: None))
        assert isinstance(ask, Push)
        return ask.parts

    push(went)
    goes.load_state_dict(copy.deepcopy(went.state_dict()))
    one, other = push(went), push(goes)
    for name, parts in one.items():
        assert all(torch.equal(a, b) for a, b in zip(parts, other[name], strict=True))


def peers_of(mode: Mode, events: int) -> list[int]:
    peers = []
    for _ in range(events):
        asks = mode.closing(lambda: None)
        ask = next(asks)
        assert isinstance(ask, Pair)
        peers.append(ask.peer)
        asks.close()
    return peers


def test_a_worker_meets_its_neighbours_and_the_choice_survives_saving() -> None:
    went, goes = (seated("gossip, asp", parameters(), workers=5) for _ in range(2))
    assert set(peers_of(went, 20)) == {0, 2}
    goes.load_state_dict(went.state_dict())
    assert peers_of(went, 9) == peers_of(goes, 9)


def test_in_a_pair_i_move_by_what_the_meeting_changed() -> None:
    """Another may have moved me while I waited: its change is kept."""
    held: dict[str, Tensor] = {"w": nn.Parameter(torch.zeros(2))}
    mode = seated("gossip, asp", held, workers=2)
    asks = mode.closing(lambda: None)
    next(asks)
    with torch.no_grad():
        held["w"].add_(10)
    with pytest.raises(StopIteration):
        asks.send((torch.ones(2),))
    assert held["w"].tolist() == [11, 11]


def test_alone_in_a_ring_there_is_nobody_to_meet() -> None:
    mode = seated("gossip, asp", parameters(), workers=1, worker=0)
    assert list(mode.closing(lambda: None)) == []


@pytest.mark.parametrize("text", ["local(2)", "gossip", "gossip, asp", "bsp"])
def test_the_update_runs_with_gradients_enabled(text: str) -> None:
    seen = []
    mode = seated(text, parameters())
    for opened in mode.opening():
        drive(opened, alone)
    next(mode.closing(lambda: seen.append(torch.is_grad_enabled())), None)
    assert seen == [True]
    assert torch.is_grad_enabled()
