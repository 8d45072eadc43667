"""Global top-k: merged up a tree, nothing lost, the same in lockstep and in processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.axes.compression import Value, cast, gtopk
from shoal.axes.compression.gtopk import make_merge
from shoal.axes.compression.kit.sparse import decode_indices, message
from shoal.flow import Agreed, drive, nbytes, together
from shoal.testing.contracts.exchange import Case, exchange
from shoal.testing.lockstep import lockstep
from shoal.testing.processes import run_workers
from shoal.wire.collective import CollectiveWire

SHAPES = ((5, 6), (0,), (41,))
ROUNDS = 3


def parts(entries: dict[int, float], numel: int) -> tuple[Tensor, ...]:
    where = torch.tensor(sorted(entries))
    return message(where, torch.tensor([entries[int(i)] for i in where]), numel)


def entries(told: tuple[Tensor, ...], numel: int) -> dict[int, float]:
    return dict(zip(decode_indices(told, numel).tolist(), told[1].tolist(), strict=True))


def test_two_messages_become_the_largest_of_their_sum_and_the_rest_is_told() -> None:
    mine, theirs = parts({1: 3.0, 4: 2.0}, 9), parts({4: 2.5, 8: -4.0}, 9)
    kept, (where, amount) = make_merge(9)(mine, theirs)
    assert entries(kept, 9) == {4: 4.5, 8: -4.0}
    assert (where.tolist(), amount.tolist()) == ([1], [3.0])
    assert [t.shape for t in kept] == [t.shape for t in mine]


def test_messages_that_cancel_still_make_a_whole_message() -> None:
    kept, _ = make_merge(9)(parts({1: 3.0, 4: 2.0}, 9), parts({1: -3.0, 4: -2.0}, 9))
    assert entries(kept, 9) == {1: 0.0, 4: 0.0}


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 7, 8])
def test_mass_is_conserved_over_all_workers(workers: int) -> None:
    states, meant, sent = None, torch.zeros(8, 9), torch.zeros(8, 9)
    for round in range(5):
        gradients = Case((8, 9), torch.float64, workers).gradients(round)
        one = exchange(gtopk(0.1), gradients, states=states, round=round)
        states = one.states
        assert int(one.ends[0].mean.count_nonzero()) <= 7
        meant = meant + torch.stack(gradients).sum(0)
        sent = sent + workers * one.ends[0].mean
        kept = torch.stack([state[0] for state in states]).sum(0)
        torch.testing.assert_close(sent + kept, meant, rtol=0, atol=1e-12)
        mine = torch.stack([end.mine.dense() for end in one.ends]).mean(0)
        torch.testing.assert_close(mine, one.ends[0].mean, rtol=0, atol=1e-12)


def test_who_merges_keeps_what_the_merge_left_out() -> None:
    gradients = [torch.tensor([5.0, 0.0, 0.0]), torch.tensor([0.0, 4.0, 0.0])]
    one = exchange(gtopk(0.34), gradients)
    assert one.ends[0].mean.tolist() == [2.5, 0.0, 0.0]
    assert [state[0].tolist() for state in one.states] == [[0.0, 4.0, 0.0], [0.0, 0.0, 0.0]]


def test_a_message_is_as_long_with_many_workers_as_with_few() -> None:
    sizes = {
        nbytes(exchange(gtopk(0.1), Case((300,), torch.float32, n).gradients()).asks[0][0])
        for n in (1, 2, 5)
    }
    assert len(sizes) == 1


def values(worker: int, workers: int, round: int) -> list[Value]:
    made = [Case(shape, torch.float64, workers).gradients(round)[worker] for shape in SHAPES]
    return [Value(tensor, str(i)) for i, tensor in enumerate(made)]


def take_part(workers: int) -> list[list[tuple[Any, Any]]]:
    """Rounds of several tensors in one message, over gloo; one beside another ask; one alone."""
    dist.init_process_group("gloo")
    wire, me = CollectiveWire(None), dist.get_rank()
    states = [gtopk(0.1).init(v) for v in values(me, workers, 0)]
    told = []
    for round in range(ROUNDS):
        given = values(me, workers, round)
        flows = [gtopk(0.1).flow(v, s, round) for v, s in zip(given, states, strict=True)]
        ends = drive(together(flows), lambda ask: wire.ask(ask).wait())
        states = [end.state for end in ends]
        told.append([(end.mean, end.state[0].clone()) for end in ends])
    given = values(me, workers, 0)
    mixed = [cast().flow(given[0], None, 0), gtopk(0.1).flow(given[2], states[2], 0)]
    drive(together(mixed), lambda ask: wire.ask(ask).wait())
    alone = gtopk(0.1).flow(given[0], gtopk(0.1).init(given[0]), 0)
    end: Agreed = drive(alone, lambda ask: wire.ask(ask).wait())
    told.append([(end.mean, end.state[0])])
    return [[(a.numpy(), b.numpy()) for a, b in one] for one in told]


def expected(workers: int) -> list[list[list[tuple[Tensor, Tensor]]]]:
    """By round, tensor and worker."""
    states = [[gtopk(0.1).init(v) for v in values(i, workers, 0)] for i in range(workers)]
    told = []
    for round in range(ROUNDS):
        flows = [
            together(
                gtopk(0.1).flow(v, s, round)
                for v, s in zip(values(i, workers, round), states[i], strict=True)
            )
            for i in range(workers)
        ]
        ends = lockstep(flows)
        states = [[end.state for end in mine] for mine in ends]
        told.append([[(end.mean, end.state[0].clone()) for end in mine] for mine in ends])
    return told


@pytest.mark.gloo
@pytest.mark.parametrize("workers", [2, 3])
def test_processes_end_with_the_bits_of_lockstep(workers: int) -> None:
    told = run_workers(workers, take_part, workers, seconds=90)
    wanted = expected(workers)
    for round in range(ROUNDS):
        for i in range(workers):
            for (mean, kept), (a, b) in zip(told[i][round], wanted[round][i], strict=True):
                assert torch.equal(torch.from_numpy(mean), a)
                assert torch.equal(torch.from_numpy(kept), b)
    for i in range(workers):
        assert torch.equal(torch.from_numpy(told[i][ROUNDS][0][0]), wanted[0][i][0][0])
