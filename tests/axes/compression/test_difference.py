"""CHOCO: models of neighbours come to their mean although little of them travels."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.axes.compression import (
    Compressor,
    Trait,
    Value,
    cast,
    difference,
    error_feedback,
    exact,
    powersgd,
    topk,
)
from shoal.axes.coordination import gossip
from shoal.errors import BadArgument, ConflictError
from shoal.flow import All, Gather, Mean
from shoal.strategy import parse
from shoal.testing.lockstep import lockstep
from shoal.testing.processes import run_workers
from shoal.testing.trainer import LockstepTrainer, digits, tiny
from shoal.wire.neighbours import NeighbourWire


def scattered(workers: int, numel: int = 60) -> list[Tensor]:
    chance = torch.Generator().manual_seed(0)
    return list(torch.randn(workers, numel, generator=chance, dtype=torch.float64))


def mixed(
    compressor: Compressor, x: list[Tensor], rounds: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Algorithm 1 of the paper on a ring; the models, and the copies."""
    w = gossip("ring").mixing(len(x), 0)
    states = [compressor.init(Value(v, "w")) for v in x]
    for round in range(rounds):
        flows = [compressor.flow(Value(v, "w"), s, round) for v, s in zip(x, states, strict=True)]
        ends = lockstep(flows, w)
        states = [end.state for end in ends]
        x = [v + compressor.gamma * (e.mean - e.mine.dense()) for v, e in zip(x, ends, strict=True)]
    return x, [state[0] for state in states]


@pytest.mark.parametrize("ratio", [0.1, 0.25, 1])
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_models_come_to_their_mean_and_keep_it(workers: int, ratio: float) -> None:
    x = scattered(workers)
    mean = torch.stack(x).mean(0)
    ends, copies = mixed(difference(topk(ratio)), x, rounds=250)
    for end, copy in zip(ends, copies, strict=True):
        torch.testing.assert_close(end, mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(copy, mean, rtol=0, atol=1e-6)


def test_narrow_numbers_do_not_let_the_copies_drift() -> None:
    x = scattered(4)
    ends, _ = mixed(difference(cast("bfloat16")), x, rounds=150)
    mean = torch.stack(x).mean(0)
    torch.testing.assert_close(torch.stack(ends), mean.expand(4, -1), rtol=0, atol=1e-9)


def test_the_sum_of_models_is_kept_in_every_round() -> None:
    x = scattered(4)
    for rounds in (1, 2, 3):
        ends, _ = mixed(difference(topk(0.1)), x, rounds)
        torch.testing.assert_close(torch.stack(ends).sum(0), torch.stack(x).sum(0))


def test_without_a_copy_models_do_not_come_together() -> None:
    x, compressor = scattered(4), topk(0.1)
    for round in range(250):
        flows = [compressor.flow(Value(v, "w"), None, round) for v in x]
        ends = lockstep(flows, gossip("ring").mixing(4, 0))
        x = [v + 0.2 * (e.mean - e.mine.dense()) for v, e in zip(x, ends, strict=True)]
    assert torch.stack(x).std(0).max() > 0.1


def test_one_round_by_hand() -> None:
    compressor = difference(topk(0.5), 0.5)
    x = [torch.tensor([4.0, 1.0]), torch.tensor([1.0, 2.0])]
    (one, two), copies = mixed(compressor, x, rounds=1)
    assert copies[0].tolist() == [4, 0]
    assert copies[1].tolist() == [0, 2]
    assert one.tolist() == [4 + 0.5 * (2 - 4), 1 + 0.5 * (1 - 0)]
    assert two.tolist() == [1 + 0.5 * (2 - 0), 2 + 0.5 * (1 - 2)]


def test_gamma_is_less_for_who_loses_more() -> None:
    gammas = [difference(topk(ratio)).gamma for ratio in (0.01, 0.1, 0.25, 1)]
    assert gammas == sorted(gammas)
    assert gammas[0] == pytest.approx(0.046, abs=0.005), "the paper's, tuned, for 1 %"
    assert gammas[-1] == 0.5


def test_copies_of_narrow_numbers_are_wide() -> None:
    value = Value(torch.ones(4, dtype=torch.bfloat16))
    assert difference(topk(0.5)).init(value)[0].dtype == torch.float32


REFUSED = [
    (exact(), "nothing is lost"),
    (powersgd(1), "second message"),
    (error_feedback(topk(0.1)), "so does the public copy"),
    (difference(topk(0.1)), "so does the public copy"),
    (Compressor("loud", Trait.ONE_SHOT, topk(0.1).flow), "diverges"),
    (Compressor("voting", Trait.MERGES, topk(0.1).flow), "not the mean"),
    (Compressor("slow", Trait.CONTRACTIVE, topk(0.1).flow), "second message"),
]


@pytest.mark.parametrize(("inner", "why"), REFUSED, ids=repr)
def test_what_it_cannot_help_is_refused(inner: Compressor, why: str) -> None:
    with pytest.raises(ConflictError, match=why):
        difference(inner)


@pytest.mark.parametrize("text", ["x", "topk(0.1), 0", "topk(0.1), 1.5", "topk(0.1), x"])
def test_bad_arguments_are_named(text: str) -> None:
    with pytest.raises(BadArgument):
        parse(f"gossip, difference({text})")


def test_gossip_takes_differences_where_it_takes_nothing_else_that_loses() -> None:
    parse("gossip, difference(topk(0.1))")
    parse("gossip, local(4), by_size(64, exact, difference(topk(0.1)))")
    with pytest.raises(ConflictError, match="difference"):
        parse("gossip, topk(0.1)")
    with pytest.raises(ConflictError, match="has no copy of this worker"):
        parse("gossip, asp, difference(topk(0.1))")
    with pytest.raises(ConflictError, match="single message"):
        parse("parameter_server, asp, difference(topk(0.1))")


def still() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = tiny()
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


@pytest.mark.parametrize(
    "compression",
    [
        "difference(topk(0.25))",
        "by_size(80, exact, difference(topk(0.25)))",
        "after(2, difference(topk(0.25)))",
    ],
)
def test_the_mixing_mode_brings_workers_to_their_mean(compression: str) -> None:
    made = LockstepTrainer(parse(f"gossip, {compression}"), workers=4, build=still)
    made.scatter()
    mean = made.models().mean(0)
    made.train(digits(12), steps=120)
    torch.testing.assert_close(made.models(), mean.expand(4, -1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("text", ["gossip", "gossip, local(2)", "all_reduce"])
def test_it_trains(text: str) -> None:
    made = LockstepTrainer(parse(f"{text}, difference(topk(0.25))"), workers=4, build=tiny)
    last = made.train(digits(24), steps=60)
    plain = LockstepTrainer(parse(text), workers=4, build=tiny)
    assert last < 1.15 * plain.train(digits(24), steps=60)


def test_copies_are_saved_and_loaded() -> None:
    made = LockstepTrainer(parse("gossip, difference(topk(0.25))"), workers=3, build=tiny)
    made.train(digits(12), steps=5)
    kept = [worker.mode.state_dict() for worker in made.workers]
    before = made.models().clone()
    made.train(digits(12), steps=3)
    went = made.models()
    again = LockstepTrainer(parse("gossip, difference(topk(0.25))"), workers=3, build=tiny)
    for worker, state, vector in zip(again.workers, kept, before, strict=True):
        worker.mode.load_state_dict(state)
        with torch.no_grad():
            nn.utils.vector_to_parameters(vector, worker.model.parameters())
    again.train(digits(12), steps=3)
    assert torch.equal(again.models(), went)


def answers() -> dict[str, Tensor]:
    """What the wire of neighbours tells this rank, of one message and of several."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    wire = NeighbourWire(None, gossip("ring").mixing(size, 0)[rank])
    flow = topk(0.4).flow(Value(torch.arange(5.0) * (rank + 1), "w"), None, 0)
    one = next(flow)
    assert isinstance(one, Gather)
    nothing = Gather((torch.zeros(0),), lambda parts, into, weight: None, torch.zeros(0))
    two, none = wire.ask(All((one, nothing))).wait()
    several = wire.ask(All((one, Mean(torch.full((2,), float(rank)))))).wait()
    return {"one": wire.ask(one).wait(), "two": two, "none": none, "sum": several[1],
            "empty": wire.ask(nothing).wait()}  # fmt: skip


@pytest.mark.gloo
@pytest.mark.parametrize("workers", [2, 4])
def test_the_wire_decodes_neighbours_with_their_weights(workers: int) -> None:
    w = gossip("ring").mixing(workers, 0)
    said = torch.stack([torch.tensor([0, 0, 0, 3.0, 4.0]) * (r + 1) for r in range(workers)])
    for rank, told in enumerate(run_workers(workers, answers)):
        expected = (w[rank] @ said.double()).float()
        torch.testing.assert_close(told["one"], expected)
        torch.testing.assert_close(told["two"], expected)
        assert told["none"].shape == told["empty"].shape == (0,)
        mean = float(w[rank] @ torch.arange(workers).double())
        torch.testing.assert_close(told["sum"], torch.full((2,), mean))


def gossiped(strategy: str, lr: float, steps: int) -> tuple[Tensor, Tensor]:
    """My model before and after; scattered by rank."""
    model, _ = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loss = nn.functional.cross_entropy
    run = shoal.distribute(model, optimizer, loss=loss, strategy=strategy)
    chance = torch.Generator().manual_seed(run.rank)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=chance, dtype=p.dtype))
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    (batch,) = digits(12)
    for _ in range(steps):
        run.step(batch)
    run.close()
    return before, nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.gloo
def test_processes_come_to_the_mean_of_their_models() -> None:
    told = run_workers(4, gossiped, "gossip, difference(topk(0.25))", 0.0, 120)
    mean = torch.stack([before for before, _ in told]).mean(0)
    for before, after in told:
        torch.testing.assert_close(after, mean, rtol=0, atol=1e-4)
        assert (before - mean).norm() > 1


def test_a_gradient_mode_agrees_on_the_mean_not_on_the_move() -> None:
    lines = [f"{t}, difference(topk(0.5))" for t in ("all_reduce", "gossip")]
    trainers = [LockstepTrainer(parse(line), workers=2, build=tiny) for line in lines]
    moves = [trainer.workers[0].mode.exchange.moves for trainer in trainers]
    assert moves == [False, True]
