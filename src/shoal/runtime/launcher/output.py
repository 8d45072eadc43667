"""Send the output of the workers to the terminal and to log files.

With ``--output all`` every process writes to the terminal, and each line starts with its name, as
in ``[rank 1]``. With ``--output main`` only rank 0 writes to the terminal. It has no pipe, so a
progress bar works. Each other process writes to a log file, whose end is shown if that process is
the first to fail and leaves no traceback.
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
TORCH_PREFIX = re.compile(rb"^\[rank\d+\]: ?")  # torch's own prefix, which is removed


class PrefixedStream:
    """Writes the output of one pipe of a worker to ``sink``, with its name before each line."""

    def __init__(self, name: str, colour: int | None, sink: IO[bytes]) -> None:
        text = f"[{name}] "
        self._prefix = (f"\x1b[{colour}m{text}\x1b[0m" if colour else text).encode()
        self._sink = sink
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Write all complete lines, and an incomplete one once it exceeds CHUNK_NBYTES."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > CHUNK_NBYTES:
            lines, self._rest = [*lines, self._rest], b""
        self._write(lines)

    def close(self) -> None:
        """Write the incomplete last line, if there is one."""
        if self._rest:
            self._write([self._rest])
            self._rest = b""

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            # A progress bar overwrites its line with \r. Only the text after the last \r counts.
            texts = (TORCH_PREFIX.sub(b"", x.rstrip(b"\r").rpartition(b"\r")[2]) for x in lines)
            self._sink.write(b"".join(self._prefix + text + b"\n" for text in texts))
            self._sink.flush()


class OutputRouter:
    """Sends all output to the terminal or to files in ``logs``, as ``mode`` (``--output``) says."""

    def __init__(self, mode: str, logs: Path) -> None:
        self._mode, self._logs = mode, logs
        self._selector = selectors.DefaultSelector()
        self._use_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def message(self, text: str) -> None:
        """Write a message of the launcher itself to stderr."""
        sys.stderr.write(f"shoal: {text}\n")
        sys.stderr.flush()

    def log_file(self, key: str) -> Path:
        """Return the path of the log file of a process that does not write to the terminal."""
        return self._logs / f"{key}.log"

    def streams(self, key: str, *, is_main: bool) -> tuple[int | None, int | None, list[int]]:
        """Return Popen's stdout and stderr, and the descriptors to close once the process runs."""
        if self._mode == "all":
            return subprocess.PIPE, subprocess.PIPE, []
        if is_main:
            return None, None, []
        log = os.open(self.log_file(key), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return log, log, [log]

    def attach(self, process: subprocess.Popen[bytes], name: str, index: int) -> None:
        """Let :meth:`forward` read the pipes of a process. ``index`` selects its colour."""
        colour = COLOURS[index % len(COLOURS)] if self._use_colour else None
        for pipe, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                stream = PrefixedStream(name, colour, sink.buffer)
                self._selector.register(pipe, selectors.EVENT_READ, stream)

    def forward(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for output and forward it. Return whether there was any."""
        if not self._selector.get_map():
            time.sleep(seconds)
            return False
        ready = self._selector.select(seconds)
        for selector_key, _ in ready:
            if data := os.read(selector_key.fd, CHUNK_NBYTES):
                selector_key.data.feed(data)
            else:
                self._close(selector_key)
        return bool(ready)

    def drain(self) -> None:
        """Forward what is in the pipes, and close our ends, even if a child may still write."""
        while self.forward(0):
            pass
        for selector_key in list(self._selector.get_map().values()):
            self._close(selector_key)

    def _close(self, selector_key: selectors.SelectorKey) -> None:
        selector_key.data.close()
        pipe = selector_key.fileobj
        self._selector.unregister(pipe)
        if not isinstance(pipe, int):
            pipe.close()  # type: ignore[attr-defined]
