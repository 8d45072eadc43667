"""Environments and starts that are wrong: refused at once, or given up in time, by name."""

from __future__ import annotations

import os
import socket
import time

import pytest
from bad_input_forms import X, Y, started

from shoal.errors import UsageError
from shoal.testing.processes import free_port, outcomes, run_workers

HERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
TWO = {"RANK": "0", "WORLD_SIZE": "2", **HERE}


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({**TWO, "RANK": "2"}, "RANK=2 but WORLD_SIZE=2: ranks run from 0 to 1; .*one too many"),
        ({**TWO, "RANK": "-1"}, "RANK=-1"),
        ({**TWO, "RANK": "one"}, "RANK='one' is not a whole number"),
        ({**TWO, "WORLD_SIZE": "1.5"}, "WORLD_SIZE='1.5' is not a whole number"),
        ({**TWO, "WORLD_SIZE": "0"}, "WORLD_SIZE=0: there must be at least one"),
        ({"RANK": "0", **HERE}, "WORLD_SIZE is not set"),
        ({**TWO, "MASTER_ADDR": ""}, "MASTER_ADDR is not set: workers cannot find each other"),
        ({**TWO, "MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({**TWO, "MASTER_PORT": "0"}, "MASTER_PORT=0: a port lies between 1 and 65535"),
        ({**TWO, "MASTER_PORT": "70000"}, "MASTER_PORT=70000: a port lies between 1 and 65535"),
        ({**TWO, "MASTER_PORT": "http"}, "MASTER_PORT='http' is not a whole number"),
        ({**TWO, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2"),
        ({**TWO, "GLOO_SOCKET_IFNAME": "nosuch0"}, "no interface 'nosuch0'; one of: .*lo"),
        ({**TWO, "SHOAL_TIMEOUT": "soon"}, "SHOAL_TIMEOUT='soon' is not a number of seconds"),
        ({**TWO, "SHOAL_JOIN_SECONDS": "-1"}, "SHOAL_JOIN_SECONDS=-1: seconds must be positive"),
        ({**TWO, "SHOAL_BACKEND": "mpi"}, "backend 'mpi' is not known: gloo"),
    ],
)
def test_a_wrong_environment_is_named_before_anybody_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], said: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=said):
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


def _three_of_four() -> int:
    return 0 if os.environ["RANK"] == "2" else _train()


@pytest.mark.gloo
def test_a_worker_that_never_starts_is_named_when_the_time_is_up() -> None:
    first, second, absent, fourth = outcomes(4, _three_of_four, env={"SHOAL_JOIN_SECONDS": "2"})
    assert absent.value == 0
    for result in (first, second, fourth):
        assert "ExchangeTimeout: rank 2 of 4 did not join within 2 s" in str(result.error)


def _claim_rank_1_twice() -> int:
    if os.environ["RANK"] == "2":
        time.sleep(0.5)
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = "1"
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "2"
    samples = _train()
    if os.environ["RANK"] == "0":
        time.sleep(2)  # it hosts the store at which the second is refused
    return samples


@pytest.mark.gloo
def test_the_second_to_claim_a_rank_is_refused_and_the_others_train_on() -> None:
    first, second, late = outcomes(3, _claim_rank_1_twice)
    assert first.value == second.value == 16
    assert "UsageError: rank 1 is already taken by process" in str(late.error)


def _told_another_size() -> int:
    if os.environ["RANK"] == "1":
        time.sleep(0.5)
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "3"
    return _train()


@pytest.mark.gloo
def test_a_worker_told_another_world_size_is_refused() -> None:
    results = outcomes(2, _told_another_size, env={"SHOAL_JOIN_SECONDS": "3"})
    assert "rank 1 was told 3 workers, others 2" in str(results[1].error)
    assert "rank 1 of 2 did not join within 3 s" in str(results[0].error)


@pytest.mark.gloo
def test_an_empty_gloo_transport_is_as_good_as_none() -> None:
    env = {"GLOO_DEVICE_TRANSPORT": "", "MASTER_PORT": str(free_port())}
    assert run_workers(2, _train, env=env) == [16, 16]
