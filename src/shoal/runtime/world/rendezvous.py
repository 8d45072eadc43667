"""The rendezvous: connect to the store, register there, and wait for the other processes.

1. Connect to the store. Rank 0 hosts it, unless a launcher does.
2. Register. A process of another run, with another token or with another world size is refused,
   and so is a second process with the same rank.
3. Wait until all are registered. An error names those that are missing in the end.

All waiting polls, because torch's blocking waits print a C++ stack.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shoal.errors import ExchangeTimeout, PeerLost, UsageError
from shoal.runtime.world import env as names
from shoal.runtime.world.env import RankEnv, fingerprint, read_seconds
from shoal.runtime.world.failures import FAILURE_KEY, STORE_PREFIX, Failure
from shoal.runtime.world.interfaces import bind

log = logging.getLogger("shoal")

POLL_SECONDS = 0.05
LOG_SECONDS = 5.0
RUN_KEY = "shoal/run"

# The k-th rendezvous of this process is with the k-th of every other one: all count alike.
_join_ids = itertools.count()
# A store that this process hosts stays open until the process ends: the others may join again.
_hosted: dict[tuple[str, int], TCPStore] = {}


def rendezvous(env: RankEnv, seconds: float) -> tuple[Store, Store]:
    """Return two views of the store, once all processes of the run are registered in it.

    The first has the keys of this join; the second those of the generation, where the launcher
    publishes failures, too. ``seconds`` is how long a single request may take later.
    """
    join_seconds = read_seconds(names.JOIN_SECONDS, names.DEFAULT_JOIN_SECONDS)
    base = _connect(env, seconds, join_seconds)
    store, run = _register(env, base), PrefixStore(env.prefix, base)
    _wait_for_all(env, store, run, join_seconds)
    return store, run


def next_join_id() -> int:
    """Count one more rendezvous of this process; the first is 0."""
    return next(_join_ids)


def _connect(env: RankEnv, seconds: float, join_seconds: float) -> Store:
    limit = timedelta(seconds=max(seconds, join_seconds))
    address = (env.host, env.port)
    if not env.hosts_store:
        return _connect_client(env, limit, join_seconds)
    if address not in _hosted:
        # torch would listen on every interface; this socket listens only where it has to.
        listener = bind(
            env.port, everywhere=env.size > env.local_size, name="MASTER_PORT=",
            instead="choose another port, the same on every worker",
        )  # fmt: skip
        _hosted[address] = TCPStore(
            *address, None, True, timeout=limit, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    return _hosted[address]


def _connect_client(env: RankEnv, limit: timedelta, join_seconds: float) -> Store:
    """Connect to the store of rank 0, once rank 0 has registered, or to that of the launcher.

    The store of rank 0 answers before rank 0 has registered. Another rank must not register first,
    because its run id, token and size would then be the ones that rank 0 is compared with.
    """
    address, where, store = (env.host, env.port), f"{env.host}:{env.port}", None
    for left, logs in _attempts(join_seconds):
        if store is None:
            try:  # a plain socket, because torch prints a C++ stack each time it cannot connect
                socket.create_connection(address, timeout=min(5.0, left)).close()
            except OSError as error:
                if logs:
                    host = f"rank 0 at {where} ({error})"
                    log.warning("%s waits for %s: %.0f s left", env.name, host, left)
                continue
        with as_fault(f"connecting to the store at {where}"):
            store = store or TCPStore(*address, None, False, timeout=limit, wait_for_workers=False)
            if env.hosted or store.check([RUN_KEY]):
                return store
    raise ExchangeTimeout(
        f"{env.name} could not reach rank 0 at {where} within {join_seconds:g} s: "
        "rank 0 is missing, or MASTER_ADDR / MASTER_PORT are wrong"
    )


def _register(env: RankEnv, base: Store) -> Store:
    """Register this process and return the store of this join."""
    if not env.hosts_store:
        _register_run(env, base)
    token = fingerprint(env.token)
    if _write_once(base, f"shoal/{env.run_id}/{env.generation}/token", token) != token:
        raise UsageError(f"{env.name} has another SHOAL_TOKEN than this run: refused")
    store = PrefixStore(f"{env.prefix}/{next_join_id()}", base)
    size = _write_once(store, f"size/{env.role}", str(env.size))
    if size != str(env.size):
        raise UsageError(f"{env.name} was started with {env.size} {env.role}s, others with {size}")
    process = f"process {os.getpid()} on {socket.gethostname()}"
    owner = _write_once(store, f"env/{env.key}", process)
    if owner != process:
        raise UsageError(f"{env.name} is already taken by {owner}: {process} is refused")
    if env.hosts_store:
        _register_run(env, base)  # last, because the other ranks wait for it
    return store


def _register_run(env: RankEnv, base: Store) -> None:
    run = _write_once(base, RUN_KEY, env.run_id)
    if run != env.run_id:
        raise UsageError(
            f"{env.name} belongs to run {env.run_id!r}, but run {run!r} uses "
            f"{env.host}:{env.port}: SHOAL_TOKEN differs, or the port belongs to another run"
        )


def _write_once(store: Store, key: str, value: str) -> str:
    """Write a value unless there is one, and return the first one written."""
    first: bytes = store.compare_set(key, "", value)
    return first.decode()


def _wait_for_all(env: RankEnv, store: Store, run: Store, join_seconds: float) -> None:
    missing = [f"env/{rank}" for rank in range(env.workers)]
    missing += [f"env/server-{index}" for index in range(env.servers)]
    failure_key = f"{STORE_PREFIX}/{FAILURE_KEY}"
    for left, logs in _attempts(join_seconds):
        with as_fault("waiting for the other workers"):
            missing = [key for key in missing if not store.check([key])]
            failed = run.check([failure_key])
        if not missing:
            return
        if failed:
            raise Failure.read(run.get(failure_key)).as_error()
        if logs:
            others = f"{_names(missing)} of {env.workers}"
            log.warning("%s waits for %s: %.0f s left", env.name, others, left)
    error = ExchangeTimeout(
        f"{_names(missing)} of {env.workers} did not join within {join_seconds:g} s: "
        "start all workers, or set WORLD_SIZE to their number "
        f"({names.JOIN_SECONDS} sets how long to wait)"
    )
    with as_fault("waiting for the other workers"):
        run.compare_set(failure_key, "", Failure.of(env.rank, error).write())
    if env.hosts_store:  # the store ends with this process: let the others read the reason first
        time.sleep(POLL_SECONDS * 6)
    raise error


def _names(keys: list[str]) -> str:
    names = [key.removeprefix("env/").replace("server-", "server ") for key in keys[:8]]
    more = [f"{len(keys) - 8} more"] if len(keys) > 8 else []
    return ("rank " if len(keys) == 1 else "ranks ") + ", ".join(names + more)


def _attempts(seconds: float) -> Iterator[tuple[float, bool]]:
    """Yield the seconds left, and whether to log them, until the time is over."""
    start = last_log = time.monotonic()
    while (left := start + seconds - (now := time.monotonic())) > 0:
        logs = now - last_log >= LOG_SECONDS
        last_log = now if logs else last_log
        yield left, logs
        time.sleep(min(POLL_SECONDS, left))


@contextmanager
def as_fault(activity: str) -> Iterator[None]:
    """Turn torch's network errors into a PeerLost that says what failed."""
    try:
        yield
    except dist.DistError as error:
        first = str(error).splitlines()[0]
        raise PeerLost(f"{activity} failed: {first}") from error
