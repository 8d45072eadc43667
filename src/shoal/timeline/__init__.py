"""Where the time of a step goes: one type for measured and simulated runs.

A worker records spans (:class:`Recorder`), writes them at its end, and :func:`collect` merges what
is there into a :class:`Timeline`: summed up as a table, drawn as a page, exported for Perfetto.
"""

from __future__ import annotations

from shoal.timeline.files import collect
from shoal.timeline.page import page, write_page
from shoal.timeline.perfetto import trace, write_trace
from shoal.timeline.record import NullRecorder, Recorder
from shoal.timeline.span import COMPUTE, DATA, EXCHANGE, LANES, NO_STEP, WAIT, Lane, Span
from shoal.timeline.summary import Row, Summary
from shoal.timeline.table import plain_table, rich_table
from shoal.timeline.timeline import Timeline

__all__ = [
    "COMPUTE",
    "DATA",
    "EXCHANGE",
    "LANES",
    "NO_STEP",
    "WAIT",
    "Lane",
    "NullRecorder",
    "Recorder",
    "Row",
    "Span",
    "Summary",
    "Timeline",
    "collect",
    "page",
    "plain_table",
    "rich_table",
    "trace",
    "write_page",
    "write_trace",
]
