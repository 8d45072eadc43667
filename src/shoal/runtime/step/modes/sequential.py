"""Average the gradients after backward: all workers keep one model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.flow import Asks
from shoal.runtime.step.modes.mode import Apply, Mode, ModeSetup, State


class SequentialGradients(Mode):
    """Gradients are averaged bucket by bucket once backward is over; the update follows.

    This is the mode of models that are spread over ranks, of one worker alone, and of the lockstep
    trainer. `OverlappedGradients` does the same while backward computes.
    """

    agrees = True

    def __init__(self, setup: ModeSetup) -> None:
        super().__init__(setup)
        self.source = setup.source
        self.workers = setup.index.workers
        self.exchange = setup.exchange()

    def averaging(self) -> Asks:
        """Average every bucket."""
        if self.workers == 1:
            return
        self.source.collect(self.exchange)
        for index in range(len(self.exchange.buckets)):
            yield from self.exchange.flow(index)
        self.source.deliver(self.exchange)

    def closing(self, apply: Apply) -> Asks:
        """Update with the averaged gradient."""
        apply()
        self.exchange.end_round()
        yield from ()

    def due(self) -> bool:
        """Return True: all workers exchange in every step."""
        return True

    def skip(self) -> None:
        """Restore the compressor's state from before the step."""
        self.exchange.revert()

    def state_dict(self) -> State:
        """Return the compressor's state."""
        return self.exchange.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self.exchange.load_state_dict(state)
