"""Join the other workers of a run: who am I, who is there, and do we agree what we train.

The same call serves ``shoal run``, torchrun, Slurm and plain ``python train.py`` (one worker, no
process group at all). Whoever hosts the store, every start of a run has its own key prefix, so a
restarted worker never reads what a dead one wrote.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.errors import ExchangeTimeout, LayoutMismatch, UsageError
from shoal.runtime.world import env as contract
from shoal.runtime.world.env import RankEnv, read_rank_env, read_seconds
from shoal.runtime.world.failures import FailureWatcher, install
from shoal.runtime.world.interfaces import gloo_choice, wrong_interface
from shoal.runtime.world.rendezvous import as_fault, meet, turn
from shoal.wire.shm.backend.registration import why_not

log = logging.getLogger("shoal")

DEFAULT_SECONDS = 300.0
LEAVE_SECONDS = 10.0


@dataclass(frozen=True)
class World:
    """One worker's view of its run."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str
    store: Store | None = field(repr=False)
    generation: int = 0
    run_id: str = "none"
    seconds: float = DEFAULT_SECONDS
    token: str = field(default="", repr=False)
    role: str = "worker"
    workers: int = 1
    servers: int = 0
    hosts_store: bool = False
    owns_group: bool = False  # join made the process group, so leave drops it
    alarm: FailureWatcher | None = field(default=None, repr=False, compare=False)
    close: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that talks and writes."""
        return self.rank == 0 and self.role == "worker"


_joined: list[World] = []


def _current() -> World | None:
    return _joined[-1] if _joined else None


def join(*, backend: str | None = None, seconds: float | None = None) -> World:
    """Meet the other workers; a second call returns the same world.

    Args:
        backend: ``gloo``, ``nccl`` or ``shoal``; by default nccl where every local worker has a
            GPU, else shoal where all workers share a host, else gloo.
        seconds: how long an exchange may take before it is given up.

    Raises:
        UsageError: the environment is wrong, or this rank is already taken.
        ExchangeTimeout: somebody did not come within SHOAL_JOIN_SECONDS; named.
    """
    if _joined:
        return _joined[-1]
    if os.environ.get("GLOO_DEVICE_TRANSPORT") == "":
        del os.environ["GLOO_DEVICE_TRANSPORT"]  # set but empty makes gloo fail
    limit = seconds if seconds is not None else read_seconds(contract.TIMEOUT, DEFAULT_SECONDS)
    if not 0 < limit < float("inf"):
        raise UsageError(f"join(seconds={seconds}): seconds must be positive and finite")
    env = read_rank_env()
    if dist.is_initialized():
        world = _adopt(env, limit)
    elif env is None:
        world = World(0, 1, 0, 1, *_alone(), store=None, seconds=limit)
    else:
        world = _meet(env, backend or os.environ.get(contract.BACKEND) or None, limit)
    _mark(world)
    _joined.append(world)
    install(_current)  # again, for init_process_group puts a hook of torch's on top
    # also runs at the end of multiprocessing's children, where atexit does not
    Finalize(None, leave, args=(world,), exitpriority=10)
    return world


def leave(world: World) -> None:
    """Take leave: stop the alarm, drop the process group if join made it."""
    if world not in _joined:
        return
    _joined.remove(world)
    if world.close is not None:
        world.close()
    _drop_group(world)


def _alone() -> tuple[torch.device, str]:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device()), "none"
    return torch.device("cpu"), "none"


def _meet(env: RankEnv, backend: str | None, seconds: float) -> World:
    device, chosen = _choose(env, backend)
    if env.size == 1 and env.servers == 0:
        return World(0, 1, 0, 1, device, "none", None, env.generation, env.run_id, seconds)
    gloo_choice()  # raises when GLOO_SOCKET_IFNAME names nothing
    why = wrong_interface(env.host) if env.workers > env.local_size else None
    if why and chosen == "gloo":
        log.warning(why)
    store, run = meet(env, seconds)
    if env.role == "worker" and env.size > 1:
        _init_group(chosen, device, PrefixStore("group", store), env, seconds)
    else:
        chosen = "none"
    alarm = FailureWatcher(run, env.rank, env.size) if env.role == "worker" else None
    if alarm is not None:
        alarm.start()
    return World(
        env.rank, env.size, env.local_rank, env.local_size, device, chosen, store,
        env.generation, env.run_id, seconds, env.token, env.role, env.workers,
        env.servers, hosts_store=env.hosts_store, alarm=alarm,
        owns_group=chosen != "none", close=_closer(store, alarm, env.key, waits=env.hosts_store),
    )  # fmt: skip


def _choose(env: RankEnv, backend: str | None) -> tuple[torch.device, str]:
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend not in (None, "gloo", "nccl", "shoal"):
        raise UsageError(
            f"backend {backend!r} is not known: gloo (any machine), nccl (NVIDIA) or shoal (CPU "
            "tensors at memory speed inside a host)"
        )
    if backend == "nccl" and cards < env.local_size:
        raise UsageError(
            f"backend nccl needs a GPU for each of {env.local_size} local workers, "
            f"but there are {cards}; use --backend gloo"
        )
    if backend == "shoal" and (why := why_not()) is not None:
        raise UsageError(f"backend shoal: {why}; use --backend gloo")
    if env.role == "server" or backend == "gloo":
        return torch.device("cpu"), "gloo"
    if backend == "shoal" or cards < env.local_size:
        together = env.workers == env.local_size and why_not() is None
        found = "shoal" if backend == "shoal" or together else "gloo"
        if cards and backend is None:
            log.warning("%d GPUs, %d local workers: on the CPU, %s", cards, env.local_size, found)
        return torch.device("cpu"), found
    torch.cuda.set_device(env.local_rank)
    return torch.device("cuda", env.local_rank), "nccl"


def _init_group(
    backend: str, device: torch.device, store: Store, env: RankEnv, seconds: float
) -> None:
    both = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    with as_fault(f"making the {backend} process group"):
        dist.init_process_group(
            both, store=store, rank=env.rank, world_size=env.size,
            timeout=timedelta(seconds=seconds),
        )  # fmt: skip


def _adopt(env: RankEnv | None, seconds: float) -> World:
    """Use a process group that the script has made itself; it stays the script's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    base = dist.distributed_c10d._get_default_store()
    run_id = env.run_id if env else "none"
    generation = env.generation if env else 0
    store = PrefixStore(f"{contract.prefix(run_id, '', generation)}/{turn()}", base)
    alarm = FailureWatcher(store, rank, size)
    alarm.start()
    backend = dist.get_backend()
    device = torch.device("cpu")
    if "nccl" in backend:
        device = torch.device("cuda", torch.cuda.current_device())
    local = (env.local_rank, env.local_size) if env else (rank, size)
    return World(
        rank, size, *local, device, backend, store, generation, run_id, seconds,
        workers=size, alarm=alarm,
        close=_closer(store, alarm, str(rank), waits=rank == 0 and not (env and env.hosted)),
    )  # fmt: skip


def _closer(
    store: Store, alarm: FailureWatcher | None, key: str, *, waits: bool
) -> Callable[[], None]:
    """What leaving means for the store; whoever hosts it waits for the others."""

    def close() -> None:
        if alarm is not None:
            alarm.stop()
        with suppress(dist.DistError, RuntimeError):  # the host of the store may have gone first
            store.set(f"left/{key}", "1")
            if alarm is not None and waits:
                _see_off(store, alarm)

    return close


def _drop_group(world: World) -> None:
    failed = world.alarm is not None and world.alarm.failure is not None
    if world.owns_group and not failed and dist.is_initialized():
        dist.destroy_process_group()  # after a failure it would wait for what cannot end


def _see_off(store: Store, alarm: FailureWatcher) -> None:
    """Keep the store open until the others have left it."""
    end = time.monotonic() + LEAVE_SECONDS
    keys = [f"left/{rank}" for rank in range(alarm.size)]
    while time.monotonic() < end and alarm.heard() is None and not store.check(keys):
        time.sleep(0.02)


def _mark(world: World) -> None:
    """Tell the launcher that this script did join."""
    directory = os.environ.get(contract.DIRECTORY)
    if directory:
        name = f"joined-{world.rank}" if world.role == "worker" else f"joined-server-{world.rank}"
        with suppress(OSError):
            Path(directory, name).touch()


def agree_layout(world: World, facts: Mapping[str, str]) -> None:
    """Raise on every rank when one of them was given another model, optimizer or learning rate.

    Goes through the store: gloo would abort the process on a shape that differs.

    Args:
        world: from :func:`join`.
        facts: what must be equal, by name; compared in order.

    Raises:
        LayoutMismatch: names two ranks, the first differing fact and both values.
    """
    if world.store is None or world.size == 1:
        return
    store = PrefixStore(f"layout/{turn()}", world.store)
    text = json.dumps(dict(facts))
    store.set(f"hash/{world.rank}", hashlib.sha256(text.encode()).hexdigest())
    store.set(f"facts/{world.rank}", text)
    _await_keys(world, store, [f"hash/{rank}" for rank in range(world.size)])
    hashes = [store.get(f"hash/{rank}") for rank in range(world.size)]
    other = next((rank for rank, told in enumerate(hashes) if told != hashes[0]), None)
    if other is not None:
        _await_keys(world, store, ["facts/0", f"facts/{other}"])
        first, second = (json.loads(store.get(f"facts/{rank}")) for rank in (0, other))
        raise LayoutMismatch(_difference(first, second, other))


def _await_keys(world: World, store: Store, keys: list[str]) -> None:
    end = time.monotonic() + world.seconds
    while not store.check(keys):
        if world.alarm is not None and (failure := world.alarm.heard()) is not None:
            raise failure.as_error()
        if time.monotonic() > end:
            missing = [key.split("/")[1] for key in keys if not store.check([key])]
            raise ExchangeTimeout(
                f"agreeing on the model did not end within {world.seconds:g} s: "
                f"rank {', '.join(missing)} missing; does every rank call distribute?"
            )
        time.sleep(0.01)


def _difference(first: dict[str, Any], second: dict[str, Any], other: int) -> str:
    for key in (*first, *(key for key in second if key not in first)):
        here, there = (facts.get(key, "nothing") for facts in (first, second))
        if here != there:
            return (
                f"rank 0 and rank {other} differ in {key}: {here} on rank 0, {there} on rank "
                f"{other}; every rank must build the same model and optimizer"
            )
    return f"rank 0 and rank {other} name the same facts in another order"


if os.environ.get(contract.ERROR_FILE):
    install(_current)  # what fails before join is the launcher's to show, too
