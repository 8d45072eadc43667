"""Hear what Shoal says, in a worker of a test."""

from __future__ import annotations

import logging


class _Listening(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self._lines.append(record.getMessage())


def captured_logs() -> list[str]:
    """The lines that the logger ``shoal`` says from now on, for as long as the process lives."""
    lines: list[str] = []
    log = logging.getLogger("shoal")
    log.addHandler(_Listening(lines))
    log.setLevel(logging.INFO)
    return lines
