"""Where workers meet: reach the store, take a seat there, wait for the others.

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


def meet(seat: RankEnv, seconds: float) -> JoinedStores:
    """The store of this generation, once everybody is there.

    Args:
        seat: who this process is.
        seconds: how long a single request to the store may take later on.
    """
    join_seconds = contract.read_seconds(contract.JOIN_SECONDS, contract.DEFAULT_JOIN_SECONDS)
    base = _connect(seat, seconds, join_seconds)
    meeting = JoinedStores(_admit(seat, base), PrefixStore(seat.prefix, base))
    _wait_for_all(seat, meeting, join_seconds)
    return meeting


def turn() -> int:
    """Count one more meeting of this process with the others; the first is 0."""
    return next(_turns)


def _connect(seat: RankEnv, seconds: float, join_seconds: float) -> Store:
    """The store all meet at; hosted by rank 0 unless a launcher hosts it."""
    limit = timedelta(seconds=max(seconds, join_seconds))
    where = (seat.host, seat.port)
    if seat.hosts_store and where in _hosted:
        return _hosted[where]
    if seat.hosts_store:
        fd = _listen(seat)
        _hosted[where] = TCPStore(
            seat.host, seat.port, None, True, timeout=limit, wait_for_workers=False,
            master_listen_fd=fd,
        )  # fmt: skip
        return _hosted[where]
    _reach(seat, join_seconds)
    with as_fault(f"connecting to the store at {seat.host}:{seat.port}"):
        return TCPStore(seat.host, seat.port, None, False, timeout=limit, wait_for_workers=False)


def _listen(seat: RankEnv) -> int:
    # torch listens on every interface whatever address it is told; this socket keeps to one.
    everywhere = seat.size > seat.local_size
    instead = "choose another port, the same on every worker"
    return bind(seat.port, everywhere=everywhere, name="MASTER_PORT=", instead=instead).detach()


def _reach(seat: RankEnv, join_seconds: float) -> None:
    """Wait until somebody listens; torch's own waiting prints a C++ stack for each try."""
    tell = _Teller()
    for left in _countdown(join_seconds):
        try:
            socket.create_connection((seat.host, seat.port), timeout=min(5.0, left)).close()
            return
        except OSError as error:
            tell(left, f"{seat.name} waits for rank 0 at {seat.host}:{seat.port} ({error})")
    raise ExchangeTimeout(
        f"{seat.name} could not reach rank 0 at {seat.host}:{seat.port} within "
        f"{join_seconds:g} s: rank 0 is missing, or MASTER_ADDR / MASTER_PORT are wrong"
    )


def _admit(seat: RankEnv, base: Store) -> Store:
    """Take the seat, or be refused: another run, another token, another size, or taken."""
    run = _first(base, "shoal/run", seat.run_id)
    if run != seat.run_id:
        raise UsageError(
            f"{seat.name} belongs to run {seat.run_id!r}, but {run!r} meets at "
            f"{seat.host}:{seat.port}: another SHOAL_TOKEN, or another run's port"
        )
    token = contract.fingerprint(seat.token)
    if _first(base, f"shoal/{seat.run_id}/{seat.generation}/token", token) != token:
        raise UsageError(f"{seat.name} has another SHOAL_TOKEN than this run: refused")
    store = PrefixStore(f"{seat.prefix}/{turn()}", base)
    size = _first(store, f"size/{seat.role}", str(seat.size))
    if size != str(seat.size):
        raise UsageError(f"{seat.name} was told {seat.size} {seat.role}s, others {size}")
    me = f"process {os.getpid()} on {socket.gethostname()}"
    owner = _first(store, f"seat/{seat.key}", me)
    if owner != me:
        raise UsageError(f"{seat.name} is already taken by {owner}: {me} is refused")
    return store


def _first(store: Store, key: str, value: str) -> str:
    """What the first to ask wrote."""
    told: bytes = store.compare_set(key, "", value)
    return told.decode()


def _wait_for_all(seat: RankEnv, meeting: JoinedStores, join_seconds: float) -> None:
    missing, tell = _awaited(seat), _Teller()
    for left in _countdown(join_seconds):
        with as_fault("waiting for the other workers"):
            missing = [key for key in missing if not meeting.store.check([key])]
            failed = meeting.run.check(["alarm/failure"])
        if not missing:
            return
        if failed:
            raise Failure.read(meeting.run.get("alarm/failure")).as_error()
        tell(left, f"{seat.name} waits for {_names(missing)} of {seat.workers}")
    error = ExchangeTimeout(
        f"{_names(missing)} of {seat.workers} did not join within {join_seconds:g} s: "
        "start all workers, or set WORLD_SIZE to as many as there are "
        f"({contract.JOIN_SECONDS} sets how long to wait)"
    )
    _pass_on(seat, meeting, error)
    raise error


def _pass_on(seat: RankEnv, meeting: JoinedStores, error: ExchangeTimeout) -> None:
    """Let the others give up for the same reason, before the store goes with its host."""
    with as_fault("waiting for the other workers"):
        meeting.run.compare_set("alarm/failure", "", Failure.of(seat.rank, error).write())
    if seat.hosts_store:
        time.sleep(LOOK_SECONDS * 6)


def _awaited(seat: RankEnv) -> list[str]:
    workers = [f"seat/{rank}" for rank in range(seat.workers)]
    return workers + [f"seat/server-{index}" for index in range(seat.servers)]


def _names(keys: list[str]) -> str:
    shown = [key.removeprefix("seat/").replace("server-", "server ") for key in keys[:8]]
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
