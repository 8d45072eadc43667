"""Note exchanges on the timeline: from the ask to the moment its answer arrived."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from shoal.flow import Ask, nbytes
from shoal.timeline.record import Recorder
from shoal.wire.pending import Pending, Wire, Works


class Stamped(NamedTuple):
    """An answer under way whose arrival is noted."""

    pending: Pending
    arrived: Callable[[], None]

    def wait(self) -> Any:
        """Wait, and note it unless the work's own callback did."""
        answer = self.pending.wait()
        self.arrived()
        return answer


class Watched:
    """A wire whose exchanges are spans.

    Args:
        wire: who answers.
        recorder: where the spans go.
    """

    def __init__(self, wire: Wire, recorder: Recorder) -> None:
        self.size = wire.size
        self.blocks = wire.blocks
        self.inner = wire
        self.step = 0
        self._recorder = recorder

    def ask(self, ask: Ask) -> Pending:
        """Issue an ask; its span ends when the answer is there, not when somebody looks."""
        if not self._recorder.enabled:
            return self.inner.ask(ask)
        start, step, size = time.perf_counter(), self.step, nbytes(ask)
        unnoted = [True]

        def arrived(*_: object) -> None:
            try:
                unnoted.pop()  # at once, for two threads may come together
            except IndexError:
                return
            seconds = time.perf_counter() - start
            self._recorder.add("exchange", type(ask).__name__, start, seconds, size, step)

        pending = self.inner.ask(ask)
        if isinstance(pending, Works) and pending.works and pending.signals:
            pending.works[-1].get_future().add_done_callback(arrived)
        return Stamped(pending, arrived)

    def leave(self) -> None:
        """The run is over."""
        self.inner.leave()
