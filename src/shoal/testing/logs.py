"""Capture Shoal's log messages in a test worker."""

from __future__ import annotations

import logging


def captured_logs() -> list[str]:
    """Return a list to which messages of the logger ``shoal`` are added until the process ends."""
    lines: list[str] = []

    class ListHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log = logging.getLogger("shoal")
    log.addHandler(ListHandler())
    log.setLevel(logging.INFO)
    return lines
