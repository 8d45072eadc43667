"""Laws of joining: all ranks meet, a rank is taken once, all ranks agree or all raise."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.errors import FaultError, UsageError
from shoal.runtime.world import interfaces, rendezvous
from shoal.runtime.world.env import RankEnv, read_rank_env, read_seconds
from shoal.runtime.world.error_context import explain, report_failure
from shoal.runtime.world.failures import POSITION
from shoal.runtime.world.join import agree_layout, current, join, leave
from shoal.runtime.world.world import World
from shoal.testing.processes import Outcome, outcomes, run_workers

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SHOAL_ROLE")
MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    while (world := current()) is not None:  # an earlier test may leave at the process's end
        leave(world)


def test_alone_there_is_one_worker_and_no_process_group() -> None:
    world = join()
    try:
        assert (world.rank, world.size, world.is_main) == (0, 1, True)
        assert world.store is None
        assert not dist.is_initialized()
        assert join() is world
        agree_layout(world, {"lr": "0.1"})
    finally:
        leave(world)


def test_an_empty_gloo_transport_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "")
    leave(join())
    assert "GLOO_DEVICE_TRANSPORT" not in os.environ


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match="positive"):
        join(seconds=seconds)


@pytest.mark.parametrize(
    ("env", "word"),
    [
        ({"RANK": "4", "WORLD_SIZE": "4", **MASTER}, "start fewer processes"),
        ({"RANK": "-1", "WORLD_SIZE": "4", **MASTER}, "RANK=-1"),
        ({"RANK": "0", "WORLD_SIZE": "0", **MASTER}, "at least one"),
        ({"RANK": "one", "WORLD_SIZE": "4", **MASTER}, "whole number"),
        ({"RANK": "1", **MASTER}, "WORLD_SIZE is not set"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "1", "WORLD_SIZE": "2", **MASTER, "MASTER_PORT": "70000"}, "65535"),
        ({"RANK": "1", "WORLD_SIZE": "2", **MASTER, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"},
         "LOCAL_RANK=3"),
    ],
)  # fmt: skip
def test_a_wrong_environment_is_named(env: dict[str, str], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        read_rank_env(env)


def test_slurm_tasks_are_ranks_once_they_know_where_to_meet() -> None:
    env = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    assert read_rank_env(env) is None
    env = read_rank_env({**env, "SLURM_NTASKS_PER_NODE": "4", **MASTER})
    assert env is not None
    assert (env.rank, env.size, env.local_rank, env.local_size) == (5, 8, 1, 4)


def test_a_server_has_an_index_but_no_rank_among_workers() -> None:
    env = {"SHOAL_ROLE": "server", "SHOAL_SERVER": "1", "SHOAL_SERVERS": "2", "WORLD_SIZE": "4"}
    env = read_rank_env({**env, **MASTER})
    assert env is not None
    assert (env.name, env.key, env.workers, env.servers) == ("server 1", "server-1", 4, 2)


def test_there_may_be_more_servers_than_workers() -> None:
    env = {"SHOAL_ROLE": "server", "SHOAL_SERVER": "2", "SHOAL_SERVERS": "3", "WORLD_SIZE": "2"}
    local = {"LOCAL_RANK": "1", "SLURM_LOCALID": "7", "LOCAL_WORLD_SIZE": "2"}
    env = read_rank_env({**env, **local, **MASTER})
    assert env is not None
    assert (env.rank, env.workers, env.local_rank, env.local_size) == (2, 2, 0, 2)


def test_generations_never_share_keys() -> None:
    envs = [
        read_rank_env(
            {"RANK": "0", "WORLD_SIZE": "2", **MASTER, "TORCHELASTIC_RESTART_COUNT": str(g)}
        )
        for g in (0, 1)
    ]
    assert len({env.prefix for env in envs if env}) == 2


@pytest.mark.parametrize("text", ["soon", "0", "-3", "inf"])
def test_seconds_in_the_environment_must_be_seconds(text: str) -> None:
    with pytest.raises(UsageError, match="SHOAL_TIMEOUT"):
        read_seconds("SHOAL_TIMEOUT", 1.0, {"SHOAL_TIMEOUT": text})


def test_an_interface_that_is_missing_is_named() -> None:
    with pytest.raises(UsageError, match="nosuch0"):
        interfaces.gloo_choice({"GLOO_SOCKET_IFNAME": "nosuch0"})


def test_gloo_on_loopback_is_warned_of_only_when_others_are_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        interfaces, "addresses", lambda host: [{"far": "192.0.2.1"}.get(host, host)]
    )
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.1")
    assert interfaces.why_unreachable("127.0.0.1", {}) is None
    assert "GLOO_SOCKET_IFNAME" in (interfaces.why_unreachable("far", {}) or "")
    monkeypatch.setattr(interfaces, "can_bind", lambda address: True)
    monkeypatch.setattr(socket, "gethostname", lambda: "192.0.2.7")
    assert interfaces.why_unreachable("far", {}) is None


@pytest.mark.parametrize(
    ("routes", "address"),
    [
        ({"node0": "10.0.0.7", interfaces.OTHER_MACHINE_ADDRESS: "192.168.1.7"}, "10.0.0.7"),
        ({"node0": "127.0.0.1", interfaces.OTHER_MACHINE_ADDRESS: "192.168.1.7"}, "192.168.1.7"),
        ({interfaces.OTHER_MACHINE_ADDRESS: "192.168.1.7"}, "192.168.1.7"),
    ],
)
def test_others_are_told_an_address_that_they_can_reach(
    routes: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Probe(socket.socket):
        def connect(self, where: tuple[str, int]) -> None:  # type: ignore[override]
            if where[0] not in routes:
                raise OSError("no route")
            self.address = routes[where[0]]

        def getsockname(self) -> tuple[str, int]:
            return self.address, 0

    monkeypatch.setattr(socket, "socket", Probe)
    assert interfaces.own_address("node0") == address


def errors(results: list[Outcome]) -> list[str]:
    """The last line of each worker's traceback."""
    return [
        (result.error or "").strip().splitlines()[-1] if result.error else "" for result in results
    ]


def _sum() -> tuple[float, World]:
    world = join(seconds=20)
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total)
    return float(total), (world.rank, world.size, world.env.local_rank, world.backend)  # type: ignore[return-value]


@pytest.mark.gloo
def test_workers_meet_and_reduce() -> None:
    assert run_workers(3, _sum) == [(3.0, (rank, 3, rank, "shoal")) for rank in range(3)]


def _again() -> int:
    sizes = []
    for _ in range(2):
        world = join(seconds=20)
        dist.barrier()
        sizes.append(world.size)
        leave(world)
        assert not dist.is_initialized()
    return sum(sizes)


@pytest.mark.gloo
def test_workers_may_leave_and_join_again() -> None:
    assert run_workers(2, _again) == [4, 4]


def _adopt() -> tuple[int, bool]:
    dist.init_process_group("gloo")
    world = join(seconds=20)
    agree_layout(world, {"a": "1"})
    leave(world)
    return world.size, dist.is_initialized()


@pytest.mark.gloo
def test_a_group_the_script_made_is_used_and_left_alone() -> None:
    assert run_workers(2, _adopt) == [(2, True)] * 2


def _differ() -> float:
    world = join(seconds=20)
    facts = {"layer.weight": "(4, 4) float32", "lr": "0.1" if world.rank != 2 else "0.2"}
    start = time.monotonic()
    agree_layout(world, facts)
    return time.monotonic() - start


@pytest.mark.gloo
def test_all_ranks_hear_what_differs_and_between_whom() -> None:
    lines = errors(outcomes(3, _differ))
    assert len(set(lines)) == 1
    difference = "rank 0 and rank 2 differ in lr: 0.1 on rank 0, 0.2 on rank 2"
    assert f"LayoutMismatch: {difference}" in lines[0]


def _miss_a_fact() -> None:
    world = join(seconds=20)
    agree_layout(world, {"w": "1"} if world.rank == 0 else {"w": "1", "bias": "(4,)"})


@pytest.mark.gloo
def test_a_parameter_only_one_rank_has_is_named() -> None:
    assert all(
        "differ in bias: nothing on rank 0" in line for line in errors(outcomes(2, _miss_a_fact))
    )


def wait_for(*files: Path) -> None:
    """Wait until all files exist, so that order does not depend on how busy the machine is."""
    end = time.monotonic() + 60
    while not all(file.exists() for file in files) and time.monotonic() < end:
        time.sleep(0.02)


def _two_of_three(started: Path) -> None:
    rank = os.environ["RANK"]
    if rank != "1":
        Path(started, rank).touch()
        wait_for(started / "0", started / "2")  # a slow start is not part of the time limit
        join(seconds=20)


@pytest.mark.gloo
def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    lines = errors(outcomes(3, _two_of_three, tmp_path, env={"SHOAL_JOIN_SECONDS": "3"}))
    assert "ExchangeTimeout: rank 1 of 3 did not join within 3 s" in lines[0]
    assert lines[2] == lines[0]


def _no_master() -> None:
    if os.environ["RANK"] != "0":
        join(seconds=20)


@pytest.mark.gloo
def test_a_missing_rank_0_is_named_with_the_place_to_meet() -> None:
    lines = errors(outcomes(2, _no_master, env={"SHOAL_JOIN_SECONDS": "1"}))
    assert "could not reach rank 0 at 127.0.0.1:" in lines[1]


def _both_claim_1(refused: Path) -> int:
    rank = os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(min(1, int(os.environ["RANK"])))
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        world = join(seconds=20)
    except UsageError:
        refused.touch()
        raise
    if rank == "0":
        wait_for(refused)  # keeps the store open for the one to be refused
    return world.rank


@pytest.mark.gloo
def test_the_second_to_claim_a_rank_is_refused(tmp_path: Path) -> None:
    first, *others = outcomes(3, _both_claim_1, tmp_path / "refused")
    assert first.value == 0
    assert [other.value for other in others if other.error is None] == [1]
    lines = "".join(errors(others))
    assert lines.count("rank 1 is already taken by process") == 1


def _other_token(refused: Path) -> None:
    os.environ["SHOAL_TOKEN"] = "right" if os.environ["RANK"] == "0" else "wrong"
    if os.environ["RANK"] == "0":
        threading.Thread(target=join, daemon=True).start()  # it waits for rank 1 until the end
        wait_for(refused)
        return
    try:
        join(seconds=20)
    finally:
        refused.touch()


@pytest.mark.gloo
def test_another_token_is_refused(tmp_path: Path) -> None:
    lines = errors(outcomes(2, _other_token, tmp_path / "refused"))
    assert lines[0] == ""
    assert "has another SHOAL_TOKEN" in lines[1]
    assert "right" not in lines[1]


def _late_host(order: Path) -> None:
    if os.environ["RANK"] == "0":
        os.environ["SHOAL_TOKEN"] = "right"
        register = rendezvous._register

        def late(env: RankEnv, base: dist.Store) -> dist.Store:
            (order / "open").touch()  # the store answers, but rank 0 has not registered
            time.sleep(1)
            return register(env, base)

        rendezvous._register = late  # type: ignore[assignment]
        threading.Thread(target=join, daemon=True).start()
        wait_for(order / "refused")
        return
    os.environ["SHOAL_TOKEN"] = "wrong"
    wait_for(order / "open")
    try:
        join(seconds=20)
    finally:
        (order / "refused").touch()


@pytest.mark.gloo
def test_the_host_of_the_store_registers_first(tmp_path: Path) -> None:
    lines = errors(outcomes(2, _late_host, tmp_path))
    assert lines[0] == ""
    assert "rank 1 has another SHOAL_TOKEN" in lines[1]


def _fails(kind: str, ended: Path) -> None:
    world = join(seconds=4)
    others = [ended / str(rank) for rank in range(3)]
    POSITION.step, POSITION.exchange = 7, "bucket 0"
    if world.rank == 1:
        POSITION.exchange = ""
        if kind == "raises":
            report_failure(world, ValueError("bad sample"))
            others[1].touch()
            return
        wait_for(others[0], others[2])
        others[1].touch()
        return
    try:
        dist.all_reduce(torch.ones(1))
    except (RuntimeError, FaultError) as error:
        raise explain(world, error) from None
    finally:
        others[world.rank].touch()
        if world.rank == 0:
            wait_for(*others)  # it hosts the store


@pytest.mark.gloo
def test_survivors_learn_who_failed_and_why(tmp_path: Path) -> None:
    lines = errors(outcomes(3, _fails, "raises", tmp_path))
    assert [line for line in lines if line] == [
        "shoal.errors.PeerLost: rank 1 failed: ValueError: bad sample"
    ] * 2


@pytest.mark.gloo
def test_a_timeout_names_the_exchange_and_who_is_elsewhere(tmp_path: Path) -> None:
    lines = errors(outcomes(3, _fails, "is slow", tmp_path))
    for line in (lines[0], lines[2]):
        assert "ExchangeTimeout: exchange 'bucket 0' of step 7 did not end within 4 s" in line
        assert "rank 1 is missing; rank 1 is computing in step 7" in line


def test_an_error_that_is_not_about_peers_is_left_alone() -> None:
    world = join()
    try:
        error = ValueError("shapes")
        assert explain(world, error) is error
    finally:
        leave(world)
