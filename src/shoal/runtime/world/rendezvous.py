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
from typing import NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shoal.errors import ExchangeTimeout, PeerLost, UsageError
from shoal.runtime.world.env import (
    DEFAULT_JOIN_SECONDS,
    JOIN_SECONDS,
    RankEnv,
    fingerprint,
    read_seconds,
)
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


class JoinedStores(NamedTuple):
    """Two views of one store."""

    store: Store  # the keys of this join
    run: Store  # the keys of the generation, where the launcher publishes failures, too


def rendezvous(env: RankEnv, seconds: float) -> JoinedStores:
    """Return the store, once all processes of the run are registered in it.

    Args:
        env: the place of this process in the run.
        seconds: how long a single request to the store may take later.
    """
    join_seconds = read_seconds(JOIN_SECONDS, DEFAULT_JOIN_SECONDS)
    base = _connect(env, seconds, join_seconds)
    stores = JoinedStores(_register(env, base), PrefixStore(env.prefix, base))
    _wait_for_all(env, stores, join_seconds)
    return stores


def next_join_id() -> int:
    """Count one more rendezvous of this process; the first is 0."""
    return next(_join_ids)


def _connect(env: RankEnv, seconds: float, join_seconds: float) -> Store:
    limit = timedelta(seconds=max(seconds, join_seconds))
    address = (env.host, env.port)
    if env.hosts_store:
        if address not in _hosted:
            # torch would listen on every interface; this socket listens where it has to.
            listener = bind(
                env.port,
                everywhere=env.size > env.local_size,
                name="MASTER_PORT=",
                instead="choose another port, the same on every worker",
            )
            _hosted[address] = TCPStore(
                *address, None, True, timeout=limit, wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )  # fmt: skip
        return _hosted[address]
    _wait_for_port(env, join_seconds)
    with as_fault(f"connecting to the store at {env.host}:{env.port}"):
        store = TCPStore(*address, None, False, timeout=limit, wait_for_workers=False)
    if not env.hosted:
        _wait_for_host(env, store, join_seconds)
    return store


def _wait_for_port(env: RankEnv, join_seconds: float) -> None:
    """Wait until the store accepts connections; torch's own wait prints a C++ stack each time."""
    for progress in _attempts(join_seconds):
        try:
            socket.create_connection((env.host, env.port), timeout=min(5.0, progress.left)).close()
            return
        except OSError as error:
            progress.log(f"{env.name} waits for rank 0 at {env.host}:{env.port} ({error})")
    raise _unreachable(env, join_seconds)


def _wait_for_host(env: RankEnv, store: Store, join_seconds: float) -> None:
    """Wait until rank 0 has registered, so that its run id, token and size are the ones compared.

    Its store answers before that; on a busy machine another rank would register first.
    """
    for _ in _attempts(join_seconds):
        with as_fault("waiting for rank 0"):
            if store.check([RUN_KEY]):
                return
    raise _unreachable(env, join_seconds)


def _unreachable(env: RankEnv, join_seconds: float) -> ExchangeTimeout:
    return ExchangeTimeout(
        f"{env.name} could not reach rank 0 at {env.host}:{env.port} within "
        f"{join_seconds:g} s: rank 0 is missing, or MASTER_ADDR / MASTER_PORT are wrong"
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


def _wait_for_all(env: RankEnv, stores: JoinedStores, join_seconds: float) -> None:
    missing = [f"env/{rank}" for rank in range(env.workers)]
    missing += [f"env/server-{index}" for index in range(env.servers)]
    failure_key = f"{STORE_PREFIX}/{FAILURE_KEY}"
    for progress in _attempts(join_seconds):
        with as_fault("waiting for the other workers"):
            missing = [key for key in missing if not stores.store.check([key])]
            failed = stores.run.check([failure_key])
        if not missing:
            return
        if failed:
            raise Failure.read(stores.run.get(failure_key)).as_error()
        progress.log(f"{env.name} waits for {_names(missing)} of {env.workers}")
    error = ExchangeTimeout(
        f"{_names(missing)} of {env.workers} did not join within {join_seconds:g} s: "
        "start all workers, or set WORLD_SIZE to their number "
        f"({JOIN_SECONDS} sets how long to wait)"
    )
    with as_fault("waiting for the other workers"):
        stores.run.compare_set(failure_key, "", Failure.of(env.rank, error).write())
    if env.hosts_store:  # the store ends with this process: let the others read the reason first
        time.sleep(POLL_SECONDS * 6)
    raise error


def _names(keys: list[str]) -> str:
    names = [key.removeprefix("env/").replace("server-", "server ") for key in keys[:8]]
    more = [f"{len(keys) - 8} more"] if len(keys) > 8 else []
    return ("rank " if len(keys) == 1 else "ranks ") + ", ".join(names + more)


class _Attempt:
    """One attempt of a wait: the seconds that are left, and a log line every few seconds."""

    def __init__(self) -> None:
        self.left = 0.0
        self._last_log = time.monotonic()

    def log(self, reason: str) -> None:
        if time.monotonic() - self._last_log >= LOG_SECONDS:
            self._last_log = time.monotonic()
            log.warning("%s: %.0f s left", reason, self.left)


def _attempts(seconds: float) -> Iterator[_Attempt]:
    """Yield until the time is over, with a short sleep after each attempt."""
    end, attempt = time.monotonic() + seconds, _Attempt()
    while (left := end - time.monotonic()) > 0:
        attempt.left = left
        yield attempt
        time.sleep(min(POLL_SECONDS, left))


@contextmanager
def as_fault(activity: str) -> Iterator[None]:
    """Turn torch's network errors into a PeerLost that says what failed."""
    try:
        yield
    except dist.DistError as error:
        first = str(error).splitlines()[0]
        raise PeerLost(f"{activity} failed: {first}") from error
