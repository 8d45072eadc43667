"""A span: one worker was busy with one thing for some time.

Measured and simulated timelines share this type, so whatever reads one reads the other.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Lane = Literal["compute", "exchange", "wait", "data"]

COMPUTE: Final = "compute"
EXCHANGE: Final = "exchange"
WAIT: Final = "wait"
DATA: Final = "data"
LANES: Final[tuple[Lane, ...]] = (COMPUTE, EXCHANGE, WAIT, DATA)

NO_STEP: Final = -1  # of no step: set-up, evaluation, a checkpoint; drawn, but not summed up


class Span(NamedTuple):
    """What a worker did, from ``start`` for ``seconds``.

    ``wait`` is the main thread blocked; ``exchange`` is a message under way, whoever waits for it;
    ``data`` is fetching the batch. ``nbytes`` is what was sent, 0 where nothing was.
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
        """When it was over."""
        return self.start + self.seconds
