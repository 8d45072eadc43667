"""A span: one activity of one worker, with its start and duration.

Measured and simulated timelines use the same type, so all tools work with both.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Lane = Literal["compute", "exchange", "wait", "data"]

COMPUTE: Final = "compute"
EXCHANGE: Final = "exchange"
WAIT: Final = "wait"
DATA: Final = "data"
LANES: Final[tuple[Lane, ...]] = (COMPUTE, EXCHANGE, WAIT, DATA)

NO_STEP: Final = -1  # the step of set-up, evaluation and checkpoints, which a summary ignores


class Span(NamedTuple):
    """One activity of a worker, which begins at ``start`` (seconds) and takes ``seconds``.

    In the lane ``compute``, the worker computes. In ``exchange``, a message is being sent, whether
    or not a thread waits for it. In ``wait``, the main thread is blocked. In ``data``, the next
    batch is being read. ``nbytes`` is the number of bytes sent.
    """

    worker: int
    lane: str
    name: str
    start: float
    seconds: float
    nbytes: int
    step: int

    @property
    def end(self) -> float:
        """The time at which the activity ended, in seconds."""
        return self.start + self.seconds
