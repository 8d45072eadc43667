"""The equality law: n workers over gloo give the parameters of one process on the whole batch."""

from __future__ import annotations

from functools import cache

import pytest
from equality_cases import CASES, Parameters, alone, difference, trained

from shoal.strategy import parse
from shoal.testing.processes import run_workers

pytestmark = pytest.mark.gloo
TOLERANCE = 1e-9
COLLECTIVE = ["fifo", "wfbp", "wfbp(1)", "priority", "priority(64)"]
ROUTED = ["fifo, ring", "wfbp(1), ring", "priority(64), ring"]
SERVED = [
    "parameter_server, fifo",
    "parameter_server(2), wfbp(1)",
    "parameter_server, priority(64)",
]


@cache
def expected(name: str) -> tuple[Parameters, list[float]]:
    return alone(CASES[name])


def legal(name: str, strategy: str) -> bool:
    """Clipping needs the norm of all gradients, and priority does not wait for it."""
    return not (CASES[name].options.get("clip") and "priority" in strategy)


def train_all(names: list[str], strategy: str) -> dict[str, tuple[Parameters, list[float]]]:
    return {name: trained(CASES[name], strategy) for name in names}


def check(name: str, told: tuple[Parameters, list[float]], *, what: str) -> None:
    wanted, losses = expected(name)
    assert difference(told[0], wanted) <= TOLERANCE, what
    assert told[1] == pytest.approx(losses, abs=TOLERANCE), what


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", COLLECTIVE)
def test_lossless_collectives_equal_one_process(strategy: str, workers: int) -> None:
    names = [name for name in CASES if legal(name, strategy)]
    for rank, told in enumerate(run_workers(workers, train_all, names, strategy)):
        for name, result in told.items():
            check(name, result, what=f"{name}, {strategy}, rank {rank} of {workers}")


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("strategy", ROUTED)
def test_a_route_of_our_own_equals_one_process(strategy: str, workers: int) -> None:
    names = ["odd, momentum", "gated, adam", "joining"]
    for rank, told in enumerate(run_workers(workers, train_all, names, strategy)):
        for name, result in told.items():
            check(name, result, what=f"{name}, {strategy}, rank {rank} of {workers}")


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("strategy", SERVED)
@pytest.mark.parametrize("name", ["odd, momentum", "gated, adam", "clip", "joining"])
def test_a_summing_server_equals_one_process(name: str, strategy: str, workers: int) -> None:
    if not legal(name, strategy):
        pytest.skip("clipping needs every gradient")
    servers = parse(strategy).coordination.servers
    told = run_workers(workers, train_all, [name], strategy, servers=servers)
    for rank, results in enumerate(told):
        check(name, results[name], what=f"{name}, {strategy}, rank {rank} of {workers}")
