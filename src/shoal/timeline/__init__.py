"""Record and show how each worker spends the time of a step, measured or simulated.

A worker records spans (:class:`Recorder`) and writes them to a file at the end of the run.
:func:`collect` merges the files into a :class:`Timeline`, which can be summarised as a table, drawn
as an HTML page, or exported for Perfetto.
"""

from shoal.timeline.files import collect
from shoal.timeline.page import page, write_page
from shoal.timeline.perfetto import trace, write_trace
from shoal.timeline.record import NullRecorder, Recorder
from shoal.timeline.span import COMPUTE, DATA, EXCHANGE, LANES, NO_STEP, WAIT, Lane, Span
from shoal.timeline.summary import Row, Summary
from shoal.timeline.table import plain_table, rich_table
from shoal.timeline.timeline import Timeline

__all__ = [
    "COMPUTE", "DATA", "EXCHANGE", "LANES", "NO_STEP", "WAIT", "Lane", "NullRecorder", "Recorder",
    "Row", "Span", "Summary", "Timeline", "collect", "page", "plain_table", "rich_table", "trace",
    "write_page", "write_trace",
]  # fmt: skip
