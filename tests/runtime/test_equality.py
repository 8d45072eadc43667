"""The equality law: n workers give the parameters of one process on the whole batch.

Over gloo, and over shared memory, which ``distribute`` chooses where all workers share a host.
"""

from __future__ import annotations

from functools import cache

import pytest
from equality_cases import CASES, Parameters, alone, difference, trained

from shoal.strategy import parse
from shoal.testing.processes import run_workers

pytestmark = pytest.mark.gloo
TOLERANCE = 1e-9
FOUR = pytest.param(4, marks=pytest.mark.slow)
COLLECTIVE = ["fifo", "wfbp", "wfbp(1)", "priority", "priority(64)"]
ROUTED = ["fifo, ring", "wfbp(1), ring", "priority(64), ring"]
Told = tuple[Parameters, list[float]]
GLOO, SHARED = ({"SHOAL_BACKEND": name} for name in ("gloo", "shoal"))


@cache
def expected(name: str) -> Told:
    return alone(CASES[name])


def legal(name: str, strategy: str) -> bool:
    """Clipping needs the norm of all gradients, and priority does not wait for it."""
    return not (CASES[name].options.get("clip") and "priority" in strategy)


def train_all(names: list[str], *strategies: str) -> dict[str, Told]:
    """Many runs one after the other, in the same processes."""
    jobs = [(name, strategy) for strategy in strategies for name in names if legal(name, strategy)]
    return {f"{name}; {strategy}": trained(CASES[name], strategy) for name, strategy in jobs}


def check(told: list[dict[str, Told]]) -> None:
    for rank, results in enumerate(told):
        for what, (parameters, losses) in results.items():
            wanted, means = expected(what.partition("; ")[0])
            assert difference(parameters, wanted) <= TOLERANCE, f"{what}, rank {rank}"
            assert losses == pytest.approx(means, abs=TOLERANCE), f"{what}, rank {rank}"


@pytest.mark.parametrize("workers", [1, 2, 3, FOUR])
@pytest.mark.parametrize("group", [COLLECTIVE[:3], COLLECTIVE[3:]], ids=["after", "early"])
def test_lossless_collectives_equal_one_process(group: list[str], workers: int) -> None:
    check(run_workers(workers, train_all, list(CASES), *group, env=GLOO))


@pytest.mark.parametrize("workers", [2, 3, FOUR])
def test_a_route_of_our_own_equals_one_process(workers: int) -> None:
    names = ["odd, momentum", "gated, adam", "joining"]
    check(run_workers(workers, train_all, names, *ROUTED, env=GLOO))


@pytest.mark.parametrize("workers", [2, 3])
def test_buckets_in_shared_memory_equal_one_process(workers: int) -> None:
    check(run_workers(workers, train_all, list(CASES), "wfbp", "wfbp(1)", env=SHARED))
    early = ["odd, momentum", "gated, adam", "joining"]
    check(run_workers(workers, train_all, early, "priority(64)", "wfbp, ring", env=SHARED))


@pytest.mark.parametrize(
    ("strategy", "workers", "name"),
    [
        ("parameter_server, fifo", 2, "odd, momentum"),
        ("parameter_server, fifo", 4, "clip"),
        ("parameter_server(2), wfbp(1)", 3, "odd, momentum"),
        ("parameter_server(2), wfbp(1)", 4, "joining"),
        ("parameter_server, priority(64)", 2, "gated, adam"),
        ("parameter_server, priority(64)", 4, "joining"),
    ],
)
def test_a_summing_server_equals_one_process(strategy: str, workers: int, name: str) -> None:
    servers = parse(strategy).coordination.servers
    check(run_workers(workers, train_all, [name], strategy, servers=servers, env=GLOO))
