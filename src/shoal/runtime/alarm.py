"""When one rank fails the others learn why, within about a second.

gloo tells a survivor only "connection closed by peer", or nothing until its timeout. Here every
worker has a line of its own to the store: whoever fails writes the reason there, and a thread that
looks four times a second answers on behalf of a main thread that may be stuck inside an exchange:

1. a rank whose exchange broke rings the bell and says where it is;
2. every live rank hears the bell and says where *it* is, stuck or not;
3. who has failed is known by name; who does not answer is missing.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.errors import ExchangeTimeout, PeerLost, ShoalError
from shoal.runtime.launcher.contract import ERROR_FILE

if TYPE_CHECKING:
    from shoal.runtime.join import World

LOOK_SECONDS = 0.25
ANSWER_SECONDS = 1.0
TAIL_LINES = 30
CONSEQUENCES = {"PeerLost": PeerLost, "ExchangeTimeout": ExchangeTimeout}
LOST = ("connection", "reset", "closed", "broken pipe", "peer", "socket", "store", "gloo", "nccl")
LATE = ("timed out", "timeout")


@dataclass(frozen=True)
class Failure:
    """Why a worker ended before its time."""

    rank: int
    type: str
    message: str
    traceback: str = ""
    exit_code: int = 1
    seconds: float = 0.0  # the machine's monotonic clock, to tell who was first

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """The failure an exception makes."""
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        tail = "".join(lines).splitlines()[-TAIL_LINES:]
        code = error.exit_code if isinstance(error, ShoalError) else 1
        return cls(rank, type(error).__name__, str(error), "\n".join(tail), code, time.monotonic())

    def as_error(self) -> ShoalError:
        """What the other ranks raise; a consequence is passed on, not wrapped again."""
        if self.type in CONSEQUENCES:
            return CONSEQUENCES[self.type](self.message)
        return PeerLost(f"rank {self.rank} failed: {self.type}: {self.message}")


@dataclass
class Position:
    """Where this process is: its step, and the exchange it is in ("" while it computes)."""

    step: int = 0
    exchange: str = ""

    def __str__(self) -> str:
        doing = f"exchange {self.exchange!r} of " if self.exchange else "computing in "
        return f"{doing}step {self.step}"


_here = Position()


def progress(step: int, exchange: str = "") -> None:
    """Note that this process is in ``exchange`` of ``step``; costs two assignments."""
    _here.step = step
    _here.exchange = exchange


class Alarm:
    """One worker's line to the others: the bell, the reason, the positions."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        # Of its own, because a client answers one question at a time and wait() blocks it.
        self._store = PrefixStore("alarm", store.clone())
        self.rank = rank
        self.size = size
        self.failure: Failure | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="shoal-alarm", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what was heard stays known."""
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(LOOK_SECONDS * 4)

    def raise_failure(self, failure: Failure) -> None:
        """Tell everyone; only the first failure is kept."""
        told = self._store.compare_set("failure", "", json.dumps(asdict(failure)))
        self._store.set("bell", "1")
        self.failure = self.failure or _failure(told)

    def heard(self) -> Failure | None:
        """The first failure of the run, asked of the store now."""
        if self.failure is None and self._store.check(["failure"]):
            self.failure = _failure(self._store.get("failure"))
        return self.failure

    def answer(self) -> None:
        """Say where this rank is."""
        self._store.set(f"at/{self.rank}", json.dumps(asdict(_here)))

    def ask(self) -> dict[int, Position]:
        """Ring, and collect where everyone is until all have answered or the time is up."""
        self.answer()
        self._store.set("bell", "1")
        limit = time.monotonic() + ANSWER_SECONDS
        found: dict[int, Position] = {}
        while len(found) < self.size and self.heard() is None:
            for rank in set(range(self.size)) - set(found):
                if self._store.check([f"at/{rank}"]):
                    found[rank] = Position(**json.loads(self._store.get(f"at/{rank}")))
            if time.monotonic() > limit:
                break
            time.sleep(LOOK_SECONDS / 5)
        return found

    def _watch(self) -> None:
        # The store goes when its host does; then there is nobody left to hear from.
        with suppress(dist.DistError, RuntimeError):
            while not self._stopped.wait(LOOK_SECONDS):
                if self._store.check(["bell"]):
                    self.heard()
                    self.answer()


def _failure(told: bytes) -> Failure:
    return Failure(**json.loads(told))


def report_failure(world: World, error: BaseException) -> None:
    """Tell the other ranks and the launcher why this one ends."""
    failure = Failure.of(world.rank, error)
    write_error_file(failure)
    if world.alarm is not None:
        with suppress(dist.DistError, RuntimeError):
            world.alarm.raise_failure(failure)


def write_error_file(failure: Failure) -> None:
    """Leave the reason where the launcher looks for it; the first one stays."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    with suppress(OSError), open(path, "x", encoding="utf-8") as file:
        json.dump(asdict(failure), file)


def raise_if_failed(world: World) -> None:
    """Raise when another rank is known to have failed; costs one attribute, no message."""
    if world.alarm is not None and world.alarm.failure is not None:
        raise world.alarm.failure.as_error()


def explain(world: World, error: Exception) -> Exception:
    """The error to raise in place of a low-level one that an exchange met.

    ``raise explain(world, error) from error``. An error that is not about a peer comes back as
    it is. Waits about a second at most.
    """
    text = str(error).lower()
    late = any(word in text for word in LATE)
    about_peers = isinstance(error, (dist.DistError, RuntimeError)) and (
        late or any(word in text for word in LOST)
    )
    if world.alarm is None or isinstance(error, ShoalError) or not about_peers:
        return error
    try:
        found = world.alarm.ask()
        failure = world.alarm.heard()
    except (dist.DistError, RuntimeError):
        return PeerLost(
            f"the store is gone, and with it whoever hosts it (rank 0?), during {_here}"
        )
    if failure is not None and failure.rank != world.rank:
        return failure.as_error()
    return _blame(world, found, late=late)


def _blame(world: World, found: dict[int, Position], *, late: bool) -> ShoalError:
    silent = [rank for rank in range(world.size) if rank not in found]
    elsewhere = [
        f"rank {rank} is at {position}"
        for rank, position in sorted(found.items())
        if position != _here
    ]
    if late:
        missing = silent or [rank for rank, position in found.items() if position != _here]
        who = f"{_ranks(missing)} missing" if missing else "every rank is there, but it did not end"
        why = " (no sign of life: stopped, dead or unreachable)" if silent else ""
        parts = [f"{_here} did not end within {world.seconds:g} s: {who}{why}", *elsewhere]
        return ExchangeTimeout("; ".join(parts))
    who = f"{_ranks(silent)} gone" if silent else "a connection broke, though all ranks live"
    return PeerLost("; ".join([f"{who}, during {_here}", *elsewhere]))


def _ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names} is" if len(ranks) == 1 else f"ranks {names} are"


def install(world: World, *, linger_seconds: float = 0.0) -> None:
    """Make an exception that ends this process known to the others and to the launcher."""
    before, pid = sys.excepthook, os.getpid()
    launched = bool(os.environ.get(ERROR_FILE))

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if os.getpid() != pid:
            return before(kind, error, trace)
        if not issubclass(kind, KeyboardInterrupt):
            report_failure(world, error)
        elif launched:
            return None  # the launcher says that it was interrupted; once is enough
        before(kind, error, trace)
        time.sleep(linger_seconds)  # whoever hosts the store stays until the others have read it
        return None

    sys.excepthook = hook
