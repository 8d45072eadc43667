"""Where the workers' words go: every rank's with a prefix, or only rank 0's.

In ``all`` each line carries ``[rank 1]``; in ``main`` rank 0 has the terminal to itself (a progress
bar works) and the others write to a file each, shown when they fail.
"""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

CHUNK_NBYTES = 1 << 16
COLOURS = (36, 33, 32, 35, 34, 31)
TORCH_PREFIX = re.compile(rb"^\[rank\d+\]: ?")  # torch marks tracebacks itself; once is enough


class OutputLine:
    """One worker's stream, cut into lines that carry its name."""

    def __init__(self, name: str, colour: int | None, sink: IO[bytes]) -> None:
        text = f"[{name}] "
        self._prefix = (f"\x1b[{colour}m{text}\x1b[0m" if colour else text).encode()
        self._sink = sink
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Write all whole lines; keep what has no end yet."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > CHUNK_NBYTES:
            lines, self._rest = [*lines, self._rest], b""
        self._write(lines)

    def close(self) -> None:
        """Write what is left."""
        if self._rest:
            self._write([self._rest])
            self._rest = b""

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            # what a progress bar had drawn over is not worth a line
            shown = (TORCH_PREFIX.sub(b"", x.rstrip(b"\r").rpartition(b"\r")[2]) for x in lines)
            self._sink.write(b"".join(self._prefix + line + b"\n" for line in shown))
            self._sink.flush()


class Screen:
    """What the user sees of a run, and the files with what they do not."""

    def __init__(self, output: str, logs: Path) -> None:
        self.output = output
        self.logs = logs
        self._selector = selectors.DefaultSelector()
        self._colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def say(self, text: str) -> None:
        """A word of the launcher itself."""
        sys.stderr.write(f"shoal: {text}\n")
        sys.stderr.flush()

    def log_of(self, key: str) -> Path:
        """Where a silent worker's output is."""
        return self.logs / f"{key}.log"

    def streams(self, key: str, *, is_main: bool) -> tuple[int | None, int | None, list[int]]:
        """Standard output and error for a new worker, and what to close once it has started."""
        if self.output == "all":
            return subprocess.PIPE, subprocess.PIPE, []
        if is_main:
            return None, None, []
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        log = os.open(self.log_of(key), flags, 0o600)
        return log, log, [log]

    def follow(self, process: subprocess.Popen[bytes], name: str, number: int) -> None:
        """Show what a worker writes to its pipes."""
        colour = COLOURS[number % len(COLOURS)] if self._colour else None
        for pipe, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                line = OutputLine(name, colour, sink.buffer)
                self._selector.register(pipe, selectors.EVENT_READ, line)

    def pump(self, seconds: float) -> bool:
        """Pass on what has arrived, waiting at most ``seconds``; whether there was anything."""
        if not self._selector.get_map():
            time.sleep(seconds)
            return False
        ready = self._selector.select(seconds)
        for key, _ in ready:
            data = os.read(key.fd, CHUNK_NBYTES)
            if data:
                key.data.feed(data)
            else:
                self._drop(key)
        return bool(ready)

    def finish(self) -> None:
        """Show what is still in the pipes; a grandchild that holds one open is not waited for."""
        while self.pump(0):
            pass
        for key in list(self._selector.get_map().values()):
            self._drop(key)

    def _drop(self, key: selectors.SelectorKey) -> None:
        key.data.close()
        self._selector.unregister(key.fileobj)
        if not isinstance(key.fileobj, int):
            key.fileobj.close()  # type: ignore[attr-defined]
