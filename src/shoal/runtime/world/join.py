"""Join the other workers of a run, and check that all of them build the same model.

:func:`join` works under ``shoal run``, torchrun, Slurm and plain ``python train.py``, which is one
worker without a process group. Every start of a run has its own key prefix in the store, so a
restarted worker never reads what a dead one wrote.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.errors import ExchangeTimeout, LayoutMismatch, ShoalError, UsageError
from shoal.runtime.world import env as names
from shoal.runtime.world.env import RankEnv, read_rank_env, read_seconds
from shoal.runtime.world.error_context import install_excepthook
from shoal.runtime.world.failures import STORE_PREFIX, FailureWatcher
from shoal.runtime.world.interfaces import gloo_choice, why_unreachable
from shoal.runtime.world.rendezvous import as_peer_lost, next_join_id, rendezvous
from shoal.runtime.world.world import DEFAULT_SECONDS, World
from shoal.wire.shm.backend.registration import why_not

log = logging.getLogger("shoal")

LEAVE_SECONDS = 10.0

# The world of this process, or empty. It is a module-level variable, because torch allows only one
# default process group in a process, and because the exception hook has to find it.
_joined: list[World] = []


def current() -> World | None:
    """Return the world that this process has joined and not left, or None."""
    return _joined[-1] if _joined else None


def join(*, backend: str | None = None, seconds: float | None = None) -> World:
    """Join the other workers. A second call returns the same world.

    Args:
        backend: ``gloo``, ``nccl`` or ``shoal``. The default is the first of these that applies:
            SHOAL_BACKEND if set, nccl if every local worker has a GPU, shoal if all workers
            share a host and it works there, and gloo.
        seconds: how long an exchange may take before it fails with an ExchangeTimeout. The default
            is SHOAL_TIMEOUT, or 300 s if that is unset.

    Raises:
        UsageError: the environment is wrong, or another process has this rank.
        ExchangeTimeout: a process, which is named, did not join within SHOAL_JOIN_SECONDS.
    """
    if _joined:
        return _joined[-1]
    if os.environ.get("GLOO_DEVICE_TRANSPORT") == "":
        del os.environ["GLOO_DEVICE_TRANSPORT"]  # gloo fails if the variable is set but empty
    limit = seconds if seconds is not None else read_seconds(names.TIMEOUT, DEFAULT_SECONDS)
    if not 0 < limit < float("inf"):
        raise UsageError(f"join(seconds={seconds}): the seconds must be positive and finite")
    env = read_rank_env()
    if dist.is_initialized():
        world = _adopt_group(env, limit)
    elif env is None:
        gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        world = World(RankEnv(), device, "none", seconds=limit)
    else:
        world = _meet(env, backend or os.environ.get(names.BACKEND) or None, limit)
    if directory := os.environ.get(names.DIRECTORY):
        with suppress(OSError):  # the file tells the launcher that this script has joined
            Path(directory, f"joined-{world.env.key}").touch()
    _joined.append(world)
    install_excepthook(current)  # again, because init_process_group installs one of torch's
    # A Finalize also runs at the end of multiprocessing's children, where atexit does not.
    Finalize(None, leave, args=(world,), exitpriority=10)
    return world


def leave(world: World) -> None:
    """Leave the store, and destroy the process group if join made it and no rank failed."""
    if world not in _joined:
        return
    _joined.remove(world)
    _leave_store(world)
    failed = world.watcher is not None and world.watcher.failure is not None
    if world.owns_group and not failed and dist.is_initialized():
        dist.destroy_process_group()  # after a failure this would wait for work that cannot end


def _meet(env: RankEnv, backend: str | None, seconds: float) -> World:
    """Connect to the other processes through the store, and make the workers' process group."""
    device, chosen = _choose(env, backend)
    if env.size == 1 and env.servers == 0:
        alone = RankEnv(run_id=env.run_id, generation=env.generation)
        return World(alone, device, "none", seconds=seconds)
    gloo_choice()  # raises if GLOO_SOCKET_IFNAME names an interface that does not exist
    why = why_unreachable(env.host) if env.workers > env.local_size else None
    if why and chosen == "gloo":
        log.warning(why)
    store, run = rendezvous(env, seconds)
    is_worker = env.role == "worker"
    owns_group = is_worker and env.size > 1
    if owns_group:
        with as_peer_lost(f"making the {chosen} process group"):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if chosen == "nccl" else chosen, rank=env.rank,
                world_size=env.size, store=PrefixStore("group", store),
                timeout=timedelta(seconds=seconds),
            )  # fmt: skip
    watcher = _start_watcher(run, env.rank, env.size) if is_worker else None
    chosen = chosen if owns_group else "none"
    return World(env, device, chosen, store, seconds, owns_group, watcher, env.hosts_store)


def _choose(env: RankEnv, backend: str | None) -> tuple[torch.device, str]:
    """Return the device and the backend of this process. With nccl, set the CUDA device."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend not in (None, "gloo", "nccl", "shoal"):
        raise UsageError(
            f"backend {backend!r} is not known; choose gloo (any machine), nccl (NVIDIA GPUs) or "
            "shoal (CPU tensors through the shared memory of a host)"
        )
    if backend == "nccl" and gpus < env.local_size:
        raise UsageError(
            f"backend nccl needs a GPU for each of {env.local_size} local workers, "
            f"but there are {gpus}; use --backend gloo"
        )
    if backend == "shoal" and (why := why_not()) is not None:
        raise UsageError(f"backend shoal cannot be used: {why}; use --backend gloo")
    if env.role == "server" or backend == "gloo":
        return torch.device("cpu"), "gloo"
    if backend == "shoal" or gpus < env.local_size:
        one_host = env.workers == env.local_size and why_not() is None
        chosen = "shoal" if backend == "shoal" or one_host else "gloo"
        if gpus and backend is None:
            log.warning(
                "%d GPUs are too few for %d local workers, so all train on the CPU, over %s",
                gpus, env.local_size, chosen,
            )  # fmt: skip
        return torch.device("cpu"), chosen
    torch.cuda.set_device(env.local_rank)
    return torch.device("cuda", env.local_rank), "nccl"


def _adopt_group(env: RankEnv | None, seconds: float) -> World:
    """Return a world on the script's own process group, which leave does not destroy."""
    rank, size = dist.get_rank(), dist.get_world_size()
    place = replace(
        env or RankEnv(local_rank=rank, local_size=size), rank=rank, size=size, workers=size,
        servers=0, role="worker", token="", hosted=True,  # the script made the store
    )  # fmt: skip
    base = dist.distributed_c10d._get_default_store()
    store = PrefixStore(f"{place.prefix}/{next_join_id()}", base)
    watcher = _start_watcher(store, rank, size)
    backend = dist.get_backend()
    nccl = "nccl" in backend
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    last = rank == 0 and not (env and env.hosted)
    return World(place, device, backend, store, seconds, watcher=watcher, leaves_last=last)


def _start_watcher(store: Store, rank: int, size: int) -> FailureWatcher:
    client: Store = store.clone()  # type: ignore[attr-defined]  # torch has it, its stubs do not
    return FailureWatcher(PrefixStore(STORE_PREFIX, client), rank, size)


def _leave_store(world: World) -> None:
    """Write that this rank has left. The store's host waits up to LEAVE_SECONDS for the others."""
    if world.watcher is not None:
        world.watcher.stop()
    if world.store is not None:
        # torch's RuntimeError: the host of the store has left. ShoalError: another rank has failed.
        with suppress(RuntimeError, ShoalError):
            world.store.set(f"left/{world.env.key}", "1")
            if world.leaves_last:
                keys = [f"left/{rank}" for rank in range(world.size)]
                world.missing_keys(world.store, keys, LEAVE_SECONDS)


def agree_layout(world: World, facts: Mapping[str, str]) -> None:
    """Compare ``facts`` over all ranks, and raise on every rank if they differ.

    All ranks must call it together. ``facts`` maps names to values that must be equal, such as the
    shapes of the model. The store carries them, because gloo aborts a process if shapes differ.

    Raises:
        LayoutMismatch: the error names two ranks, the first fact that differs and both values.
        ExchangeTimeout: a rank did not call this function within the timeout.
    """
    if world.store is None or world.size == 1:
        return
    store, ranks = PrefixStore(f"layout/{next_join_id()}", world.store), range(world.size)
    text = json.dumps(dict(facts))
    store.set(f"facts/{world.rank}", text)
    store.set(f"hash/{world.rank}", hashlib.sha256(text.encode()).hexdigest())
    if missing := world.missing_keys(store, [f"hash/{rank}" for rank in ranks], world.seconds):
        raise ExchangeTimeout(
            f"comparing the models did not end within {world.seconds:g} s, because rank "
            f"{', '.join(key.split('/')[1] for key in missing)} did not take part; "
            "every rank must call distribute"
        )
    hashes = [store.get(f"hash/{rank}") for rank in ranks]
    other = next((rank for rank, value in enumerate(hashes) if value != hashes[0]), None)
    if other is not None:
        first, second = (json.loads(store.get(f"facts/{rank}")) for rank in (0, other))
        raise LayoutMismatch(_difference(first, second, other))


def _difference(first: dict[str, Any], second: dict[str, Any], other: int) -> str:
    for key in first | second:
        one, two = (facts.get(key, "nothing") for facts in (first, second))
        if one != two:
            return (
                f"rank 0 and rank {other} differ in {key}: {one} on rank 0, {two} on rank "
                f"{other}; every rank must build the same model and optimizer"
            )
    return f"rank 0 and rank {other} describe the same model in another order"


if os.environ.get(names.ERROR_FILE):
    install_excepthook(current)  # so that an error before join reaches the launcher, too
