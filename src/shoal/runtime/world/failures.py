"""When one rank fails the others learn why, within about a second.

gloo tells a survivor only "connection closed by peer", or nothing until its timeout. Here every
worker has a line of its own to the store: whoever fails writes the reason there, and a thread that
looks four times a second answers on behalf of a main thread that may be stuck inside an exchange:

1. a rank whose exchange broke rings the bell and says where it is;
2. every live rank hears the bell and says where *it* is, stuck or not;
3. who has failed is known by name; who does not answer is missing.

Why a worker ended before its time, as it is told to its peers and to the launcher.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.errors import (
    CheckpointError,
    ExchangeTimeout,
    LayoutMismatch,
    PeerLost,
    ShoalError,
    UsageError,
)
from shoal.runtime.world.env import ERROR_FILE

if TYPE_CHECKING:
    from shoal.runtime.world.join import World

LOOK_SECONDS = 0.25
ANSWER_SECONDS = 1.0
LINGER_SECONDS = 0.6
LOST = ("connection", "by peer", "broken pipe", "socket", "gloo", "nccl")
LATE = ("timed out", "timeout")


@dataclass
class RankPosition:
    """Where this process is: its step, and the exchange it is in ("" while it computes)."""

    step: int = 0
    exchange: str = ""

    def __str__(self) -> str:
        doing = f"in exchange {self.exchange!r} of" if self.exchange else "computing in"
        return f"{doing} step {self.step}"


_here = RankPosition()


def progress(step: int, exchange: str = "") -> None:
    """Note that this process is in ``exchange`` of ``step``; costs two assignments."""
    _here.step = step
    _here.exchange = exchange


class FailureWatcher:
    """One worker's line to the others: the bell, the reason, the positions."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        # Of its own, because a client answers one question at a time and wait() blocks it.
        own: Store = store.clone()  # type: ignore[attr-defined]  # torch has it, its stubs do not
        self._store = PrefixStore("alarm", own)
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
        told = self._store.compare_set("failure", "", failure.write())
        self._store.set("bell", "1")
        self.failure = self.failure or Failure.read(told)

    def heard(self) -> Failure | None:
        """The first failure of the run, asked of the store now."""
        if self.failure is None and self._store.check(["failure"]):
            self.failure = Failure.read(self._store.get("failure"))
        return self.failure

    def answer(self) -> None:
        """Say where this rank is."""
        self._store.set(f"at/{self.rank}", json.dumps(asdict(_here)))

    def ask(self) -> dict[int, RankPosition]:
        """Ring, and collect where everyone is until all have answered or the time is up."""
        self.answer()
        self._store.set("bell", "1")
        limit = time.monotonic() + ANSWER_SECONDS
        found: dict[int, RankPosition] = {}
        while len(found) < self.size and self.heard() is None:
            for rank in set(range(self.size)) - set(found):
                if self._store.check([f"at/{rank}"]):
                    found[rank] = RankPosition(**json.loads(self._store.get(f"at/{rank}")))
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


def report_failure(world: World | None, error: BaseException) -> bool:
    """Tell the other ranks and the launcher why this one ends; whether the launcher will show it.

    Args:
        world: from :func:`shoal.runtime.world.join.join`; None before it.
        error: what ends this rank.
    """
    rank = world.rank if world is not None else int(os.environ.get("RANK", "0"))
    failure = Failure.of(rank, error)
    shown = leave_for_launcher(failure)
    if world is not None and world.alarm is not None:
        with suppress(dist.DistError, RuntimeError):
            world.alarm.raise_failure(failure)
    return shown


def raise_if_failed(world: World) -> None:
    """Raise when another rank is known to have failed; costs one attribute, no message."""
    if world.alarm is not None and world.alarm.failure is not None:
        raise world.alarm.failure.as_error()


def explain(world: World, error: Exception) -> Exception:
    """The error to raise in place of one that an exchange met and that knows less.

    ``raise explain(world, error) from error``. An error that is not about a peer comes back as
    it is. Waits about a second at most.
    """
    met = error.__cause__ if isinstance(error, CheckpointError) else error  # a save meets others
    if world.alarm is None or met is None or not _about_peers(met):
        return error
    try:
        found = world.alarm.ask()
        failure = world.alarm.heard()
    except (dist.DistError, RuntimeError):
        return PeerLost(f"the store is gone, and with it whoever hosts it (rank 0?), while {_here}")
    if failure is not None and failure.rank != world.rank:
        cause = failure.as_error()
        return error if str(cause) == str(error) else cause
    if isinstance(met, PeerLost):
        return PeerLost(f"{met}, while {_here}")
    late = isinstance(met, ExchangeTimeout) or any(word in str(met).lower() for word in LATE)
    blamed = _blame(world, found, late=late)
    return ExchangeTimeout(f"{blamed} ({met})") if isinstance(met, ExchangeTimeout) else blamed


def _about_peers(error: BaseException) -> bool:
    """Whether it says that somebody is late or gone: ours, or torch's by its words."""
    if isinstance(error, ShoalError):
        return isinstance(error, (PeerLost, ExchangeTimeout)) and " of step " not in str(error)
    text = str(error).lower()
    said = any(word in text for word in (*LATE, *LOST))
    return said and isinstance(error, (dist.DistError, RuntimeError))


def _blame(world: World, found: dict[int, RankPosition], *, late: bool) -> ShoalError:
    silent = [rank for rank in range(world.size) if rank not in found]
    elsewhere = [
        f"rank {rank} is {position}"
        for rank, position in sorted(found.items())
        if position != _here
    ]
    if late:
        missing = silent or [rank for rank, position in found.items() if position != _here]
        who = f"{_ranks(missing)} missing" if missing else "every rank is there, but it did not end"
        why = " (no sign of life: stopped, dead or unreachable)" if silent else ""
        what = f"exchange {_here.exchange!r} of step {_here.step}"
        parts = [f"{what} did not end within {world.seconds:g} s: {who}{why}", *elsewhere]
        return ExchangeTimeout("; ".join(parts))
    who = f"{_ranks(silent)} gone" if silent else "a connection broke, though all ranks live"
    return PeerLost("; ".join([f"{who}, while {_here}", *elsewhere]))


def _ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names} is" if len(ranks) == 1 else f"ranks {names} are"


def install(current: Callable[[], World | None]) -> None:
    """Make an exception that ends this process known to the others and to the launcher.

    Args:
        current: the world this process is in, if it has joined one by then.
    """
    before, pid = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ours, world = os.getpid() == pid, current()
        interrupted = issubclass(kind, KeyboardInterrupt)
        shown = interrupted and bool(os.environ.get(ERROR_FILE))
        if ours and not interrupted:
            shown = report_failure(world, error)
        if not (ours and shown):  # the launcher shows it, on top of everything else
            before(kind, error, trace)
        if ours and world is not None and world.hosts_store:
            time.sleep(LINGER_SECONDS)  # until the others have read why

    sys.excepthook = hook


TAIL_LINES = 60
PACKAGE = str(Path(__file__).parents[2])
CONSEQUENCES: dict[str, type[ShoalError]] = {
    kind.__name__: kind for kind in (PeerLost, ExchangeTimeout, LayoutMismatch)
}


@dataclass(frozen=True)
class Failure:
    """One worker's end; JSON on the wire and on disk."""

    rank: int
    type: str
    message: str
    traceback: str = ""
    exit_code: int = 1
    seconds: float = 0.0  # the machine's monotonic clock, to tell who was first

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """The failure an exception makes."""
        lines = _own_lines(error) if isinstance(error, UsageError) else []
        lines = lines or traceback.format_exception(type(error), error, error.__traceback__)
        tail = "".join(lines).splitlines()[-TAIL_LINES:]
        code = error.exit_code if isinstance(error, ShoalError) else 1
        return cls(rank, type(error).__name__, str(error), "\n".join(tail), code, time.monotonic())

    @classmethod
    def read(cls, text: bytes | str) -> Failure:
        """What :meth:`write` wrote."""
        return cls(**json.loads(text))

    def write(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @property
    def is_consequence(self) -> bool:
        """Whether it only says that somebody else failed."""
        return self.type in CONSEQUENCES

    def says_as(self, other: Failure | None) -> bool:
        """Whether another worker says the very same."""
        return other is not None and (self.type, self.message) == (other.type, other.message)

    def as_error(self) -> ShoalError:
        """What the other ranks raise; a consequence is passed on, not wrapped again."""
        if self.is_consequence:
            return CONSEQUENCES[self.type](self.message)
        verb = "failed: " if self.traceback else ""  # else the launcher's word: died, ended
        return PeerLost(f"rank {self.rank} {verb}{self.type}: {self.message}")


def _own_lines(error: BaseException) -> list[str]:
    """Which line of the script asked for what will not do; none if only ours are known."""
    frames = traceback.extract_tb(error.__traceback__)
    script = list(takewhile(lambda frame: not frame.filename.startswith(PACKAGE), frames))
    if not script:
        return []
    head = "Traceback (most recent call last):\n"
    return [head, *traceback.format_list(script), *traceback.format_exception_only(error)]


def leave_for_launcher(failure: Failure) -> bool:
    """Write the error file, if a launcher asked for one; whether it will be read there."""
    path = os.environ.get(ERROR_FILE)
    if path:
        with suppress(OSError), open(path, "x", encoding="utf-8") as file:
            file.write(failure.write())
            return True
    return False


def read_error_file(path: Path) -> Failure | None:
    """What a worker left, or None when it could not."""
    try:
        return Failure.read(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return None
