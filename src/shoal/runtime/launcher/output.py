"""Where the workers' output goes: all ranks to the terminal with a prefix, or rank 0 alone.

With ``--output all`` each line starts with its rank, as in ``[rank 1]``. With ``main`` rank 0 has
the terminal to itself, so that a progress bar works; each other process writes to a log file,
which is shown if that process fails.
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
TORCH_PREFIX = re.compile(rb"^\[rank\d+\]: ?")  # torch's own, which would name the rank twice


class OutputLine:
    """One stream of a worker, cut into lines that start with the worker's name."""

    def __init__(self, name: str, colour: int | None, sink: IO[bytes]) -> None:
        text = f"[{name}] "
        self._prefix = (f"\x1b[{colour}m{text}\x1b[0m" if colour else text).encode()
        self._sink = sink
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Write all complete lines; the rest waits for its end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > CHUNK_NBYTES:
            lines, self._rest = [*lines, self._rest], b""
        self._write(lines)

    def close(self) -> None:
        """Write the rest."""
        if self._rest:
            self._write([self._rest])
            self._rest = b""

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            # Of a progress bar, which overwrites itself with \r, only the last state is shown.
            texts = (TORCH_PREFIX.sub(b"", x.rstrip(b"\r").rpartition(b"\r")[2]) for x in lines)
            self._sink.write(b"".join(self._prefix + text + b"\n" for text in texts))
            self._sink.flush()


class OutputRouter:
    """Routes the output of all processes to the terminal, and to log files in ``logs``."""

    def __init__(self, output: str, logs: Path) -> None:
        self._output, self._logs = output, logs
        self._selector = selectors.DefaultSelector()
        self._colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def message(self, text: str) -> None:
        """Write a message of the launcher itself."""
        sys.stderr.write(f"shoal: {text}\n")
        sys.stderr.flush()

    def log_file(self, key: str) -> Path:
        """Return the path of the log file of a process that does not write to the terminal."""
        return self._logs / f"{key}.log"

    def streams(self, key: str, *, is_main: bool) -> tuple[int | None, int | None, list[int]]:
        """Open stdout and stderr for a new process, and list what to close after its start."""
        if self._output == "all":
            return subprocess.PIPE, subprocess.PIPE, []
        if is_main:
            return None, None, []
        log = os.open(self.log_file(key), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return log, log, [log]

    def attach(self, process: subprocess.Popen[bytes], name: str, index: int) -> None:
        """Forward the pipes of a process from now on; ``index`` chooses its colour."""
        colour = COLOURS[index % len(COLOURS)] if self._colour else None
        for pipe, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                line = OutputLine(name, colour, sink.buffer)
                self._selector.register(pipe, selectors.EVENT_READ, line)

    def forward(self, seconds: float) -> bool:
        """Forward what arrives within ``seconds``; return whether anything did."""
        if not self._selector.get_map():
            time.sleep(seconds)
            return False
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if data := os.read(key.fd, CHUNK_NBYTES):
                key.data.feed(data)
            else:
                self._close(key)
        return bool(ready)

    def drain(self) -> None:
        """Forward what is in the pipes and close them, even if a grandchild holds one open."""
        while self.forward(0):
            pass
        for key in list(self._selector.get_map().values()):
            self._close(key)

    def _close(self, key: selectors.SelectorKey) -> None:
        key.data.close()
        self._selector.unregister(key.fileobj)
        if not isinstance(key.fileobj, int):
            key.fileobj.close()  # type: ignore[attr-defined]
