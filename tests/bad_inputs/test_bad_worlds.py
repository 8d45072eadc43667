"""Environments and starts that are wrong: refused at once, or given up in time, by name."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from bad_input_forms import X, Y, started, wait_for

from shoal.errors import UsageError
from shoal.testing.processes import free_port, outcomes, run_workers

HERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
TWO = {"RANK": "0", "WORLD_SIZE": "2", **HERE}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({**TWO, "RANK": "2"}, "RANK=2 must lie between 0 and 1, because WORLD_SIZE=2; .*fewer"),
        ({**TWO, "RANK": "-1"}, "RANK=-1"),
        ({**TWO, "RANK": "one"}, "RANK='one' is not a whole number"),
        ({**TWO, "WORLD_SIZE": "1.5"}, "WORLD_SIZE='1.5' is not a whole number"),
        ({**TWO, "WORLD_SIZE": "0"}, "WORLD_SIZE=0: there must be at least one"),
        ({"RANK": "0", **HERE}, "WORLD_SIZE is not set"),
        (
            {**TWO, "MASTER_ADDR": ""},
            "MASTER_ADDR is not set, so the processes cannot find each other",
        ),
        ({**TWO, "MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({**TWO, "MASTER_PORT": "0"}, "MASTER_PORT=0: the port must lie in 1"),
        ({**TWO, "MASTER_PORT": "70000"}, "MASTER_PORT=70000: the port must lie in 1"),
        ({**TWO, "MASTER_PORT": "http"}, "MASTER_PORT='http' is not a whole number"),
        ({**TWO, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2"),
        ({**TWO, "GLOO_SOCKET_IFNAME": "nosuch0"}, "no interface 'nosuch0'; choose one of: .*lo"),
        ({**TWO, "SHOAL_TIMEOUT": "soon"}, "SHOAL_TIMEOUT='soon' is not a number of seconds"),
        (
            {**TWO, "SHOAL_JOIN_SECONDS": "-1"},
            "SHOAL_JOIN_SECONDS=-1: the seconds must be positive",
        ),
        ({**TWO, "SHOAL_BACKEND": "mpi"}, "backend 'mpi' is not known; choose gloo"),
    ],
)
def test_a_wrong_environment_is_named_before_any_waiting(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], expected: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=expected):
        started()


def test_a_port_in_use_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in {**TWO, "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UsageError, match=f"MASTER_PORT={port} cannot be used: .*another port"):
            started()


def _train() -> int:
    return started().step((X, Y)).samples


def _three_of_four(started: Path) -> int:
    rank = os.environ["RANK"]
    if rank == "2":
        return 0
    Path(started, rank).touch()
    wait_for(*(started / str(other) for other in (0, 1, 3)))
    return _train()


@pytest.mark.gloo
def test_a_worker_that_never_starts_is_named_when_the_time_is_up(tmp_path: Path) -> None:
    results = outcomes(4, _three_of_four, tmp_path, env={"SHOAL_JOIN_SECONDS": "3"})
    assert results.pop(2).value == 0
    for result in results:
        assert "ExchangeTimeout: rank 2 of 4 did not join within 3 s" in str(result.error)


def _claim_rank_1_twice(order: Path) -> int:
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "2"
    if os.environ["RANK"] == "2":
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = "1"
        wait_for(order / "trained")
        try:
            return _train()
        finally:
            (order / "refused").touch()
    samples = _train()
    (order / "trained").touch()
    if os.environ["RANK"] == "0":
        wait_for(order / "refused")  # it hosts the store at which the second is refused
    return samples


@pytest.mark.gloo
def test_the_second_to_claim_a_rank_is_refused_and_the_others_train_on(tmp_path: Path) -> None:
    first, second, late = outcomes(3, _claim_rank_1_twice, tmp_path)
    assert first.value == second.value == 16
    assert "UsageError: rank 1 is already taken by process" in str(late.error)


def _started_with_another_size(started: Path) -> int:
    rank = os.environ["RANK"]
    if rank == "1":
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "3"
    Path(started, rank).touch()
    wait_for(started / "0", started / "1")
    return _train()


@pytest.mark.gloo
def test_a_worker_started_with_another_world_size_is_refused(tmp_path: Path) -> None:
    results = outcomes(2, _started_with_another_size, tmp_path, env={"SHOAL_JOIN_SECONDS": "3"})
    assert "rank 1 was started with 3 workers, others with 2" in str(results[1].error)
    assert "rank 1 of 2 did not join within 3 s" in str(results[0].error)


@pytest.mark.gloo
def test_an_empty_gloo_transport_is_as_good_as_none() -> None:
    env = {"GLOO_DEVICE_TRANSPORT": "", "MASTER_PORT": str(free_port())}
    assert run_workers(2, _train, env=env) == [16, 16]
