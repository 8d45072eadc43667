"""Where workers meet: reach the store, take a env there, wait for the others.

Refused are another run, another token, another world size and a rank that is taken; whoever does
not come in time is named. Polls instead of torch's blocking waits, which print a C++ stack.
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
from shoal.runtime.launcher.store_host import bind
from shoal.runtime.world import env as contract
from shoal.runtime.world.env import RankEnv
from shoal.runtime.world.failures import Failure

log = logging.getLogger("shoal")

LOOK_SECONDS = 0.05
TELL_EVERY_SECONDS = 5.0

_turns = itertools.count()  # the k-th join of a process meets the k-th join of the others
_hosted: dict[tuple[str, int], TCPStore] = {}  # stays open: others may join again


class JoinedStores(NamedTuple):
    """Two views of one store."""

    store: Store  # of this join alone
    run: Store  # of the whole generation: where the launcher, too, tells of failures


def meet(env: RankEnv, seconds: float) -> JoinedStores:
    """The store of this generation, once everybody is there.

    Args:
        env: who this process is.
        seconds: how long a single request to the store may take later on.
    """
    join_seconds = contract.read_seconds(contract.JOIN_SECONDS, contract.DEFAULT_JOIN_SECONDS)
    base = _connect(env, seconds, join_seconds)
    meeting = JoinedStores(_admit(env, base), PrefixStore(env.prefix, base))
    _wait_for_all(env, meeting, join_seconds)
    return meeting


def turn() -> int:
    """Count one more meeting of this process with the others; the first is 0."""
    return next(_turns)


def _connect(env: RankEnv, seconds: float, join_seconds: float) -> Store:
    """The store all meet at; hosted by rank 0 unless a launcher hosts it."""
    limit = timedelta(seconds=max(seconds, join_seconds))
    where = (env.host, env.port)
    if env.hosts_store and where in _hosted:
        return _hosted[where]
    if env.hosts_store:
        fd = _listen(env)
        _hosted[where] = TCPStore(
            env.host, env.port, None, True, timeout=limit, wait_for_workers=False,
            master_listen_fd=fd,
        )  # fmt: skip
        return _hosted[where]
    _reach(env, join_seconds)
    with as_fault(f"connecting to the store at {env.host}:{env.port}"):
        return TCPStore(env.host, env.port, None, False, timeout=limit, wait_for_workers=False)


def _listen(env: RankEnv) -> int:
    # torch listens on every interface whatever address it is told; this socket keeps to one.
    everywhere = env.size > env.local_size
    instead = "choose another port, the same on every worker"
    return bind(env.port, everywhere=everywhere, name="MASTER_PORT=", instead=instead).detach()


def _reach(env: RankEnv, join_seconds: float) -> None:
    """Wait until somebody listens; torch's own waiting prints a C++ stack for each try."""
    tell = _Teller()
    for left in _countdown(join_seconds):
        try:
            socket.create_connection((env.host, env.port), timeout=min(5.0, left)).close()
            return
        except OSError as error:
            tell(left, f"{env.name} waits for rank 0 at {env.host}:{env.port} ({error})")
    raise ExchangeTimeout(
        f"{env.name} could not reach rank 0 at {env.host}:{env.port} within "
        f"{join_seconds:g} s: rank 0 is missing, or MASTER_ADDR / MASTER_PORT are wrong"
    )


def _admit(env: RankEnv, base: Store) -> Store:
    """Take the env, or be refused: another run, another token, another size, or taken."""
    run = _first(base, "shoal/run", env.run_id)
    if run != env.run_id:
        raise UsageError(
            f"{env.name} belongs to run {env.run_id!r}, but {run!r} meets at "
            f"{env.host}:{env.port}: another SHOAL_TOKEN, or another run's port"
        )
    token = contract.fingerprint(env.token)
    if _first(base, f"shoal/{env.run_id}/{env.generation}/token", token) != token:
        raise UsageError(f"{env.name} has another SHOAL_TOKEN than this run: refused")
    store = PrefixStore(f"{env.prefix}/{turn()}", base)
    size = _first(store, f"size/{env.role}", str(env.size))
    if size != str(env.size):
        raise UsageError(f"{env.name} was told {env.size} {env.role}s, others {size}")
    me = f"process {os.getpid()} on {socket.gethostname()}"
    owner = _first(store, f"env/{env.key}", me)
    if owner != me:
        raise UsageError(f"{env.name} is already taken by {owner}: {me} is refused")
    return store


def _first(store: Store, key: str, value: str) -> str:
    """What the first to ask wrote."""
    told: bytes = store.compare_set(key, "", value)
    return told.decode()


def _wait_for_all(env: RankEnv, meeting: JoinedStores, join_seconds: float) -> None:
    missing, tell = _awaited(env), _Teller()
    for left in _countdown(join_seconds):
        with as_fault("waiting for the other workers"):
            missing = [key for key in missing if not meeting.store.check([key])]
            failed = meeting.run.check(["alarm/failure"])
        if not missing:
            return
        if failed:
            raise Failure.read(meeting.run.get("alarm/failure")).as_error()
        tell(left, f"{env.name} waits for {_names(missing)} of {env.workers}")
    error = ExchangeTimeout(
        f"{_names(missing)} of {env.workers} did not join within {join_seconds:g} s: "
        "start all workers, or set WORLD_SIZE to as many as there are "
        f"({contract.JOIN_SECONDS} sets how long to wait)"
    )
    _pass_on(env, meeting, error)
    raise error


def _pass_on(env: RankEnv, meeting: JoinedStores, error: ExchangeTimeout) -> None:
    """Let the others give up for the same reason, before the store goes with its host."""
    with as_fault("waiting for the other workers"):
        meeting.run.compare_set("alarm/failure", "", Failure.of(env.rank, error).write())
    if env.hosts_store:
        time.sleep(LOOK_SECONDS * 6)


def _awaited(env: RankEnv) -> list[str]:
    workers = [f"env/{rank}" for rank in range(env.workers)]
    return workers + [f"env/server-{index}" for index in range(env.servers)]


def _names(keys: list[str]) -> str:
    shown = [key.removeprefix("env/").replace("server-", "server ") for key in keys[:8]]
    more = [f"{len(keys) - 8} more"] if len(keys) > 8 else []
    return ("rank " if len(keys) == 1 else "ranks ") + ", ".join(shown + more)


def _countdown(seconds: float) -> Iterator[float]:
    """Seconds left, again and again until there are none; sleeps a little in between."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        yield left
        time.sleep(min(LOOK_SECONDS, left))


class _Teller:
    """Says what is waited for, every few seconds, not every look."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, left: float, what: str) -> None:
        if time.monotonic() - self._last >= TELL_EVERY_SECONDS:
            self._last = time.monotonic()
            log.warning("%s: %.0f s left", what, left)


@contextmanager
def as_fault(doing: str) -> Iterator[None]:
    """Turn torch's network errors into one that says what was being done."""
    try:
        yield
    except dist.DistError as error:
        first = str(error).splitlines()[0]
        raise PeerLost(f"{doing} failed: {first}") from error
