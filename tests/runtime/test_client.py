"""Servers that no launcher started: each has one rank that starts it, and is no rank itself."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch

from shoal.errors import UsageError
from shoal.runtime.remote import client
from shoal.runtime.remote.client import start_servers
from shoal.runtime.world.env import RankEnv, read_rank_env
from shoal.runtime.world.world import World


def world(rank: int = 0, size: int = 2, servers: int = 0) -> World:
    env = RankEnv(rank, size, rank, size, workers=size, servers=servers)
    return World(env, torch.device("cpu"), "gloo")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The environments of what would have been started."""
    environments: list[dict[str, str]] = []

    def note(command: list[str], *, env: dict[str, str], **_: Any) -> None:
        environments.append(env)

    monkeypatch.setattr(subprocess, "Popen", note)
    monkeypatch.setattr(client.atexit, "register", lambda *_: None)
    return environments


@pytest.mark.parametrize(("size", "servers"), [(2, 1), (2, 2), (2, 3), (3, 7)])
def test_every_server_is_started_by_one_rank(
    size: int, servers: int, started: list[dict[str, str]]
) -> None:
    for rank in range(size):
        start_servers(world(rank, size), servers)
    assert sorted(int(env["SHOAL_SERVER"]) for env in started) == list(range(servers))


def test_a_server_is_told_all_but_its_parents_ranks(
    started: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "SLURM_LOCALID"), "1")
    others = {"LORA_RANK": "8", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name, value in (ranks | others).items():
        monkeypatch.setenv(name, value)
    start_servers(world(1), 4)
    assert [env["SHOAL_SERVER"] for env in started] == ["1", "3"]
    assert all(env["LORA_RANK"] == "8" and "RANK" not in env for env in started)
    index = read_rank_env(started[1])
    assert index is not None
    assert (index.name, index.workers, index.local_size) == ("server 3", 2, 2)


def test_who_has_servers_or_needs_none_starts_none(started: list[dict[str, str]]) -> None:
    start_servers(world(servers=2), 2)
    start_servers(world(), 0)
    start_servers(world(size=1), 2)
    assert started == []


@pytest.mark.parametrize(("launched", "wanted"), [(1, 2), (2, 1), (1, 0)])
def test_a_launcher_and_a_script_that_disagree_are_told_at_once(launched: int, wanted: int) -> None:
    with pytest.raises(UsageError, match=f"started {launched} servers.* has {wanted}"):
        start_servers(world(servers=launched), wanted)
