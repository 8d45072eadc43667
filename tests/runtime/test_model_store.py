"""What a server holds: who may go on, and one model that every push moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.axes.compression import cast, exact, int8, topk
from shoal.axes.compression.compressor import add_dense
from shoal.runtime.remote.model_store import Clocks, ServerModel
from shoal.testing.contracts.exchange import exchange, tensors


@given(
    st.integers(1, 6),
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=80),
)
def test_nobody_starts_further_ahead_than_the_bound_and_someone_always_may(
    workers: int, bound: int, events: list[tuple[int, bool]]
) -> None:
    clocks = Clocks(range(workers), bound)
    for choice, leaves in events:
        here = list(clocks.steps)
        if not here:
            break
        ready = [w for w in here if clocks.may_go(w)]
        assert ready, "all wait for each other"
        worker = ready[choice % len(ready)]
        assert clocks.steps[worker] - min(clocks.steps.values()) <= bound
        clocks.tick(worker)
        assert max(clocks.steps.values()) - min(clocks.steps.values()) <= bound + 1
        if leaves and choice == 0:
            clocks.leave(worker)


def test_a_bound_of_nothing_lets_all_end_a_step_before_any_begins_the_next() -> None:
    clocks = Clocks(range(3), 0)
    clocks.tick(0)
    assert [clocks.may_go(w) for w in range(3)] == [False, True, True]
    clocks.tick(1)
    clocks.tick(2)
    assert all(clocks.may_go(w) for w in range(3))


def test_nobody_waits_for_who_has_left() -> None:
    clocks = Clocks(range(2), 1)
    clocks.tick(0)
    clocks.tick(0)
    assert not clocks.may_go(0)
    clocks.leave(1)
    clocks.leave(1)
    assert clocks.may_go(0)
    assert clocks.may_go(1)


def test_without_a_bound_nobody_ever_waits() -> None:
    clocks = Clocks(range(2), float("inf"))
    for _ in range(100):
        clocks.tick(0)
    assert clocks.may_go(0)


def store(workers: int = 2, lr: float = 0.5, momentum: float = 0.0) -> ServerModel:
    parameters = {"w": nn.Parameter(torch.ones(2, 2)), "b": nn.Parameter(torch.ones(2))}
    optimizer = torch.optim.SGD(parameters.values(), lr=lr, momentum=momentum)
    return ServerModel(parameters, optimizer, add=add_dense, workers=workers)


def test_one_clock_of_all_workers_moves_the_model_as_one_step_of_bsp() -> None:
    server = store(workers=4)
    gradients = [torch.randn(2, 2) for _ in range(4)]
    for gradient in gradients:
        server.push({"w": (gradient,)})
    torch.testing.assert_close(server.model()["w"], 1 - 0.5 * torch.stack(gradients).mean(0))
    assert torch.equal(server.model()["b"], torch.ones(2))
    assert server.updates == 4


def test_what_is_not_pushed_does_not_move_even_with_momentum() -> None:
    server = store(momentum=0.9)
    server.push({"w": (torch.ones(2, 2),), "b": (torch.ones(2),)})
    before = server.model()["b"].clone()
    server.push({"w": (torch.ones(2, 2),)})
    assert torch.equal(server.model()["b"], before)


def test_a_message_is_decoded_whatever_its_form() -> None:
    for compressor in (exact(), cast(), topk(1), int8()):
        server = store()
        assert compressor.add is not None
        server.add = compressor.add
        server.push(
            {"w": tuple(tensors(exchange(compressor, [torch.full((2, 2), 2.0)]).asks[0][0]))}
        )
        assert torch.equal(server.model()["w"], torch.full((2, 2), 0.5))


def test_complex_parameters_are_pushed_as_pairs_of_real_numbers() -> None:
    w = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    server = ServerModel({"w": w}, torch.optim.SGD([w], lr=1.0), add=add_dense, workers=1)
    server.push({"w": (torch.tensor([[1.0, 2.0], [3.0, 4.0]]),)})
    assert w.tolist() == [-1 - 2j, -3 - 4j]


def test_a_workers_new_learning_rate_is_taken_over() -> None:
    server = store(lr=0.5)
    server.retune([{"lr": 0.25, "momentum": 0.0, "unheard_of": 3, "params": "not these"}])
    (group,) = server.optimizer.param_groups
    assert group["lr"] == 0.25
    assert "unheard_of" not in group
    assert len(group["params"]) == 2
    with pytest.raises(ValueError, match="shorter"):
        server.retune([])
