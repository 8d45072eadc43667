"""Capture Shoal's log lines, in a worker of a test."""

from __future__ import annotations

import logging


class _ListHandler(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Append the message."""
        self._lines.append(record.getMessage())


def captured_logs() -> list[str]:
    """Return a list to which the logger ``shoal`` appends its lines, until the process ends."""
    lines: list[str] = []
    log = logging.getLogger("shoal")
    log.addHandler(_ListHandler(lines))
    log.setLevel(logging.INFO)
    return lines
