"""Why a worker ended before its time, as it is told to its peers and to the launcher."""

from __future__ import annotations

import json
import os
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

from shoal.errors import ExchangeTimeout, LayoutMismatch, PeerLost, ShoalError, UsageError
from shoal.runtime.launcher.contract import ERROR_FILE

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
