"""Average the gradients after backward: all workers keep one model."""

from __future__ import annotations

from shoal.flow import Asks
from shoal.runtime.step.modes.mode import Apply, Mode, ModeSetup


class SequentialGradients(Mode):
    """Gradients are averaged bucket by bucket once backward is over; the update follows.

    This is the mode of models that are spread over ranks, of one worker alone, and of the lockstep
    trainer. `OverlappedGradients` does the same while backward computes.
    """

    agrees = True

    def __init__(self, setup: ModeSetup) -> None:
        super().__init__(setup)
        self.exchange = setup.exchange()
        self.model_part, self.workers = setup.model_part, setup.index.workers

    def averaging(self) -> Asks:
        """Average every bucket."""
        if self.workers == 1:
            return
        self.model_part.collect(self.exchange)
        for index in range(len(self.exchange.buckets)):
            yield from self.exchange.flow(index)
        self.model_part.deliver(self.exchange)

    def closing(self, apply: Apply) -> Asks:
        """Update with the averaged gradient."""
        apply()
        self.exchange.end_round()
        yield from ()

    def skip(self) -> None:
        """Restore the compressor's state from before the step."""
        self.exchange.revert()
