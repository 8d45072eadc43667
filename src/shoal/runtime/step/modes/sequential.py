"""Average the gradients after backward. All workers have the same model."""

from __future__ import annotations

from shoal.flow import Asks
from shoal.runtime.step.modes.mode import Apply, Mode, ModeSetup


class SequentialGradients(Mode):
    """Averages the gradients bucket by bucket after backward, before the update.

    It is used for models that are sharded over ranks, for a single worker, and by the lockstep
    trainer. `OverlappedGradients` averages gradients during backward.
    """

    agrees = True

    def __init__(self, setup: ModeSetup) -> None:
        super().__init__(setup)
        self.exchange = setup.exchange()
        self.model_part, self.workers = setup.model_part, setup.index.workers

    def averaging(self) -> Asks:
        """Return the flow that averages every bucket."""
        if self.workers == 1:
            return
        self.model_part.collect(self.exchange)
        for index in range(len(self.exchange.buckets)):
            yield from self.exchange.flow(index)
        self.model_part.deliver(self.exchange)

    def closing(self, apply: Apply) -> Asks:
        """Call ``apply`` with the averaged gradients."""
        apply()
        self.exchange.end_round()
        yield from ()

    def skip(self) -> None:
        """Restore the compressor's state from before the step."""
        self.exchange.revert()
