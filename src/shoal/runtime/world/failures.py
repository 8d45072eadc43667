"""When one rank fails, tell the other ranks the reason within about a second.

gloo tells the other ranks only "connection closed by peer", or nothing until its timeout. Therefore
every worker runs a thread with its own connection to the store. This thread works even while the
main thread is blocked inside an exchange:

1. A rank that fails writes its :class:`Failure` to the store and sets the notify key.
2. A rank whose exchange failed writes its own position and sets the notify key.
3. The thread of every rank polls the notify key four times a second. If the key is set, the thread
   reads the failure and writes the position of its rank.
4. The rank of line 2 reads the failure. If there is no failure, its error names the ranks that
   wrote no position, or a different one.

The launcher uses this module, too, so it does not import torch.
"""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ExchangeTimeout, LayoutMismatch, PeerLost, ShoalError, UsageError
from shoal.runtime.world.env import ERROR_FILE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

STORE_PREFIX = "alarm"  # comes after the run's prefix in the keys of this module
FAILURE_KEY = "failure"
NOTIFY_KEY = "bell"
POLL_SECONDS = 0.25
ANSWER_SECONDS = 1.0
TRACEBACK_LINES = 60
PACKAGE = str(Path(__file__).parents[2])
CONSEQUENCES: dict[str, type[ShoalError]] = {
    kind.__name__: kind for kind in (PeerLost, ExchangeTimeout, LayoutMismatch)
}


@dataclass(frozen=True)
class Failure:
    """Why one worker ended. It is written as JSON to the store and to the error file."""

    rank: int
    type: str
    message: str
    traceback: str = ""
    exit_code: int = 1
    seconds: float = 0.0  # when it failed, on the machine's monotonic clock

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Return the failure that describes an exception which ends a rank."""
        lines = _script_lines(error) if isinstance(error, UsageError) else []
        lines = lines or traceback.format_exception(type(error), error, error.__traceback__)
        tail = "".join(lines).splitlines()[-TRACEBACK_LINES:]
        code = error.exit_code if isinstance(error, ShoalError) else 1
        return cls(rank, type(error).__name__, str(error), "\n".join(tail), code, time.monotonic())

    @classmethod
    def read(cls, text: bytes | str) -> Failure:
        """Parse the JSON of :meth:`write`."""
        return cls(**json.loads(text))

    def write(self) -> str:
        """Return the failure as JSON."""
        return json.dumps(asdict(self))

    @property
    def is_consequence(self) -> bool:
        """Whether this error is of a type whose cause usually lies in another rank."""
        return self.type in CONSEQUENCES

    def same_reason(self, other: Failure | None) -> bool:
        """Whether another worker failed with the same error and message."""
        return other is not None and (self.type, self.message) == (other.type, other.message)

    def as_error(self) -> ShoalError:
        """Return an error for other ranks, of the same type if a consequence, or a PeerLost."""
        if self.is_consequence:
            return CONSEQUENCES[self.type](self.message)
        verb = "failed: " if self.traceback else ""  # without a traceback, type is a verb ("died")
        return PeerLost(f"rank {self.rank} {verb}{self.type}: {self.message}")


def _script_lines(error: BaseException) -> list[str]:
    """Format the frames before the first frame in Shoal, or return [] if there are none."""
    frames = traceback.extract_tb(error.__traceback__)
    script = list(takewhile(lambda frame: not frame.filename.startswith(PACKAGE), frames))
    if not script:
        return []
    head = "Traceback (most recent call last):\n"
    return [head, *traceback.format_list(script), *traceback.format_exception_only(error)]


def write_error_file(failure: Failure) -> bool:
    """Write the failure to the launcher's error file. Return whether this was possible."""
    if path := os.environ.get(ERROR_FILE):
        with suppress(OSError), open(path, "x", encoding="utf-8") as file:
            file.write(failure.write())
            return True
    return False


def read_error_file(path: Path) -> Failure | None:
    """Return the failure in a worker's error file, or None if no such file can be read."""
    try:
        return Failure.read(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return None


@dataclass
class RankPosition:
    """The step of a rank, and the exchange that it is in ("" while it computes)."""

    step: int = 0
    exchange: str = ""

    def __str__(self) -> str:
        activity = f"in exchange {self.exchange!r} of" if self.exchange else "computing in"
        return f"{activity} step {self.step}"


# The position of this rank. Each exchange writes it; the watcher's thread reads it.
POSITION = RankPosition()


class FailureWatcher:
    """Runs the thread of one worker that reads failures and writes this rank's position.

    ``store`` must be a connection of its own. On a shared connection, a long request of the run
    would block the thread.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size
        self.failure: Failure | None = None  # the first failure of the run, once it is known here
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="shoal-failures", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. ``failure`` can still be read afterwards."""
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(POLL_SECONDS * 4)

    def publish(self, failure: Failure) -> None:
        """Write a failure for all ranks, unless another one was written before."""
        first = self._store.compare_set(FAILURE_KEY, "", failure.write())
        self._store.set(NOTIFY_KEY, "1")
        self.failure = self.failure or Failure.read(first)

    def fetch_failure(self) -> Failure | None:
        """Return the run's first failure, if any. Read the store if none is known here yet."""
        if self.failure is None and self._store.check([FAILURE_KEY]):
            self.failure = Failure.read(self._store.get(FAILURE_KEY))
        return self.failure

    def collect_positions(self) -> dict[int, RankPosition]:
        """Ask all ranks for positions. Wait ANSWER_SECONDS at most, or until a failure is known."""
        self._write_position()
        self._store.set(NOTIFY_KEY, "1")
        limit = time.monotonic() + ANSWER_SECONDS
        positions: dict[int, RankPosition] = {}
        while len(positions) < self.size and self.fetch_failure() is None:
            for rank in set(range(self.size)) - set(positions):
                if self._store.check([f"at/{rank}"]):
                    positions[rank] = RankPosition(**json.loads(self._store.get(f"at/{rank}")))
            if time.monotonic() > limit:
                break
            time.sleep(POLL_SECONDS / 5)
        return positions

    def _write_position(self) -> None:
        self._store.set(f"at/{self.rank}", json.dumps(asdict(POSITION)))

    def _watch(self) -> None:
        # torch raises a RuntimeError when the host of the store has ended; the thread then ends.
        with suppress(RuntimeError):
            while not self._stopped.wait(POLL_SECONDS):
                if self._store.check([NOTIFY_KEY]):
                    self.fetch_failure()
                    self._write_position()
