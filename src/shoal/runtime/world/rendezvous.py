"""Connect to the store, register this process there, and wait for the other processes.

1. Connect to the store. Rank 0 hosts it, unless a launcher does.
2. Register. A process is refused if its run, token or world size differs, or if another process
   has the same rank.
3. Wait until all are registered. After SHOAL_JOIN_SECONDS an error names the missing processes.

All waits poll the store, because torch's blocking wait prints a C++ stack when it times out.
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

# All processes take these numbers in the same order, so equal numbers belong together.
_join_ids = itertools.count()
# The stores that this process hosts. They stay open until it ends, because others may join again.
_hosted: dict[tuple[str, int], TCPStore] = {}


def rendezvous(env: RankEnv, seconds: float) -> tuple[Store, Store]:
    """Register this process, wait for all others, and return two prefixed views of the store.

    The first view has the keys of this join. The second has those of the generation, to which the
    launcher also writes failures. The timeout of each later request is ``seconds``, or the
    time to join if that is longer.
    """
    join_seconds = read_seconds(names.JOIN_SECONDS, names.DEFAULT_JOIN_SECONDS)
    base = _connect(env, seconds, join_seconds)
    store, run = _register(env, base), PrefixStore(env.prefix, base)
    _wait_for_all(env, store, run, join_seconds)
    return store, run


def next_join_id() -> int:
    """Return the next of 0, 1, 2, ... as a key prefix. All processes must call it equally often."""
    return next(_join_ids)


def _connect(env: RankEnv, seconds: float, join_seconds: float) -> Store:
    limit = timedelta(seconds=max(seconds, join_seconds))
    address = (env.host, env.port)
    if not env.hosts_store:
        return _connect_client(env, limit, join_seconds)
    if address not in _hosted:
        # torch would listen on every interface. With workers on one host, loopback is enough.
        listener = bind(
            env.port, everywhere=env.size > env.local_size, label="MASTER_PORT=",
            advice="choose another port, and set it on every worker",
        )  # fmt: skip
        _hosted[address] = TCPStore(
            *address, None, True, timeout=limit, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    return _hosted[address]


def _connect_client(env: RankEnv, limit: timedelta, join_seconds: float) -> Store:
    """Connect to the store. If rank 0 hosts it, wait until rank 0 has registered.

    The store of rank 0 answers before rank 0 has registered. If another rank registered first, its
    run id, token and size would be taken as the right ones, and rank 0 would be refused.
    """
    address, where, store = (env.host, env.port), f"{env.host}:{env.port}", None
    for left, should_log in _attempts(join_seconds):
        if store is None:
            try:  # a plain socket, because torch prints a C++ stack if it cannot connect
                socket.create_connection(address, timeout=min(5.0, left)).close()
            except OSError as error:
                if should_log:
                    host = f"rank 0 at {where} ({error})"
                    log.warning("%s waits for %s: %.0f s left", env.name, host, left)
                continue
        with as_peer_lost(f"connecting to the store at {where}"):
            store = store or TCPStore(*address, None, False, timeout=limit, wait_for_workers=False)
            if env.hosted or store.check([RUN_KEY]):
                return store
    raise ExchangeTimeout(
        f"{env.name} could not reach rank 0 at {where} within {join_seconds:g} s: "
        "start rank 0, or correct MASTER_ADDR and MASTER_PORT"
    )


def _register(env: RankEnv, base: Store) -> Store:
    """Register this process, and return a view of the store with the keys of this join."""
    if not env.hosts_store:
        _register_run(env, base)
    token = fingerprint(env.token)
    if _write_once(base, f"shoal/{env.run_id}/{env.generation}/token", token) != token:
        raise UsageError(f"{env.name} has another SHOAL_TOKEN than the run; set the same one")
    store = PrefixStore(f"{env.prefix}/{next_join_id()}", base)
    size = _write_once(store, f"size/{env.role}", str(env.size))
    if size != str(env.size):
        raise UsageError(f"{env.name} was started with {env.size} {env.role}s, others with {size}")
    process = f"process {os.getpid()} on {socket.gethostname()}"
    owner = _write_once(store, f"env/{env.key}", process)
    if owner != process:
        raise UsageError(f"{env.name} is already taken by {owner}, so {process} is refused")
    if env.hosts_store:
        _register_run(env, base)  # written last, because the other ranks wait for this key
    return store


def _register_run(env: RankEnv, base: Store) -> None:
    run = _write_once(base, RUN_KEY, env.run_id)
    if run != env.run_id:
        raise UsageError(
            f"{env.name} belongs to run {env.run_id!r}, but run {run!r} uses "
            f"{env.host}:{env.port}; set the same SHOAL_TOKEN everywhere, or choose another port"
        )


def _write_once(store: Store, key: str, value: str) -> str:
    """Write a value unless the key has one, and return the value that the key now has."""
    first: bytes = store.compare_set(key, "", value)
    return first.decode()


def _wait_for_all(env: RankEnv, store: Store, run: Store, join_seconds: float) -> None:
    missing = [f"env/{rank}" for rank in range(env.workers)]
    missing += [f"env/server-{index}" for index in range(env.servers)]
    failure_key = f"{STORE_PREFIX}/{FAILURE_KEY}"
    for left, should_log in _attempts(join_seconds):
        with as_peer_lost("waiting for the other workers"):
            missing = [key for key in missing if not store.check([key])]
            failed = run.check([failure_key])
        if not missing:
            return
        if failed:
            raise Failure.read(run.get(failure_key)).as_error()
        if should_log:
            log.warning("%s waits for %s: %.0f s left", env.name, _names(missing, env), left)
    error = ExchangeTimeout(
        f"{_names(missing, env)} did not join within {join_seconds:g} s; "
        "start all processes, or set WORLD_SIZE to the number of workers "
        f"({names.JOIN_SECONDS} sets how long to wait)"
    )
    with as_peer_lost("waiting for the other workers"):
        run.compare_set(failure_key, "", Failure.of(env.rank, error).write())
    if env.hosts_store:  # others must read the reason before the store ends
        time.sleep(POLL_SECONDS * 6)
    raise error


def _names(keys: list[str], env: RankEnv) -> str:
    """Return the missing processes as text. In ``keys``, workers must come before servers."""
    names = [key.removeprefix("env/").replace("server-", "server ") for key in keys[:8]]
    more = [f"{len(keys) - 8} more"] if len(keys) > 8 else []
    if "server" in keys[0]:
        return ", ".join(names + more)
    return ("rank " if len(keys) == 1 else "ranks ") + f"{', '.join(names + more)} of {env.workers}"


def _attempts(seconds: float) -> Iterator[tuple[float, bool]]:
    """Yield (seconds left, whether to log now) in each round of polling, until the time is over."""
    start = last_log = time.monotonic()
    while (left := start + seconds - (now := time.monotonic())) > 0:
        should_log = now - last_log >= LOG_SECONDS
        last_log = now if should_log else last_log
        yield left, should_log
        time.sleep(min(POLL_SECONDS, left))


@contextmanager
def as_peer_lost(activity: str) -> Iterator[None]:
    """Raise torch's network errors in the block as a PeerLost that names the activity."""
    try:
        yield
    except dist.DistError as error:
        first = str(error).splitlines()[0]
        raise PeerLost(f"{activity} failed: {first}") from error
