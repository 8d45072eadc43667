"""Pairs in processes: the sum of all models is kept, early finishers go on answering."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import shoal
from shoal.errors import LayoutMismatch, PeerLost
from shoal.flow import Pair
from shoal.runtime.context import RunContext
from shoal.runtime.remote.pairs import PairWire
from shoal.runtime.settings import Settings
from shoal.runtime.world.env import RankEnv
from shoal.runtime.world.world import World
from shoal.testing.processes import outcomes, run_workers
from shoal.testing.trainer import digits, tiny
from shoal.timeline.record import NullRecorder

STRATEGY = "gossip(ring), asp"


def mixed(steps: tuple[int, ...], closes: bool) -> list[tuple[Tensor, Tensor]]:
    """Two runs one after the other; replicas differ, nobody learns: only meetings move them."""
    told = []
    for _ in range(2):
        model, _ = tiny()
        optimizer = SGD(model.parameters(), lr=0.0)
        run = shoal.distribute(
            model, optimizer, loss=nn.functional.cross_entropy, strategy=STRATEGY
        )
        with torch.no_grad():
            for p in model.parameters():
                p.add_(run.rank)
        torch.distributed.barrier()
        for _ in range(steps[run.rank]):
            run.step(digits(4)[0])
        with run.replicas["model"].agreed():
            mean = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        if closes:
            run.close()
        told.append((mean, nn.utils.parameters_to_vector(model.parameters()).detach()))
    return told


@pytest.mark.gloo
def test_meetings_keep_the_sum_of_all_models() -> None:
    told = run_workers(3, mixed, (9, 2, 5), True)
    start = nn.utils.parameters_to_vector(tiny()[0].parameters()).detach()
    for turn in range(2):
        for rank in range(3):
            mean, _ = told[rank][turn]
            torch.testing.assert_close(mean, start + 1, rtol=0, atol=1e-12)
        ends = torch.stack([told[rank][turn][1] for rank in range(3)])
        torch.testing.assert_close(ends.mean(0), start + 1, rtol=0, atol=1e-12)
        assert (ends - start).std(0).max() < 1  # and they came closer


def unequal(_: int) -> int:
    """One worker is done at once, another goes on; nobody closes its run."""
    model, optimizer = tiny()
    loss = nn.functional.cross_entropy
    run = shoal.distribute(model, optimizer, loss=loss, strategy=STRATEGY)
    steps = 1 if run.rank == 0 else 20
    for _ in range(steps):
        run.step(digits(4)[0])
        time.sleep(0.01)
    return steps


@pytest.mark.gloo
def test_who_is_done_early_goes_on_answering() -> None:
    assert run_workers(2, unequal, 0) == [1, 20]


def killed(_: int) -> None:
    model, optimizer = tiny()
    loss = nn.functional.cross_entropy
    run = shoal.distribute(model, optimizer, loss=loss, strategy=STRATEGY)
    with run:
        for step in range(200):
            if run.rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            run.step(digits(4)[0])
            time.sleep(0.01)


@pytest.mark.gloo
def test_a_peer_that_dies_is_named() -> None:
    told = outcomes(2, killed, 0, seconds=60)
    assert told[1].exitcode == -signal.SIGKILL
    assert told[0].error is not None
    assert "PeerLost" in told[0].error
    assert "rank 1" in told[0].error


def wire(rank: int, store: torch.distributed.Store, *shapes: tuple[int, ...]) -> PairWire:
    env = RankEnv(rank, 2, rank, 2, workers=2)
    world = World(env, torch.device("cpu"), "none", store, seconds=20.0)
    context = RunContext(world, shoal.parse(STRATEGY), Settings(), NullRecorder(rank))
    return PairWire({str(i): torch.zeros(s) for i, s in enumerate(shapes)}, context)


@pytest.mark.parametrize("shapes", [[(2,)], [(2,), (3,), (4,)], [(3,), (2,)]])
def test_a_peer_with_another_model_is_told_to_both(shapes: list[tuple[int, ...]]) -> None:
    store = torch.distributed.HashStore()
    mine, theirs = wire(0, store, (2,), (3,)), wire(1, store, *shapes)
    with theirs.lock, pytest.raises(PeerLost, match="rank 0 closed the connection"):
        theirs.ask(Pair(0, tuple(torch.ones(s) for s in shapes)))
    with mine.lock, pytest.raises(LayoutMismatch, match=r"rank 1 sent .* the same model"):
        mine.ask(Pair(1, (torch.ones(2), torch.ones(3))))
    assert all(p.abs().sum() == 0 for p in mine._parameters)
    for one in (mine, theirs):
        one._left = True
        one._disconnect()


def test_leaving_closes_the_connections_of_peers() -> None:
    store = torch.distributed.HashStore()
    mine, theirs = wire(0, store, (2,)), wire(1, store, (2,))
    with theirs.lock:
        told = theirs.ask(Pair(0, (torch.ones(2),))).wait()
    assert torch.equal(told[0], torch.full((2,), 0.5))
    store.set("pairs/1/done/1", "1")
    mine.leave()
    assert all(channel._socket.fileno() == -1 for channel in mine._clients)
    theirs.leave()
