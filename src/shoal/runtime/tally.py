"""What a step adds up while its micro-batches pass: samples, losses, weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.errors import UsageError
from shoal.runtime.control import Word

if TYPE_CHECKING:
    from torch import Tensor


class Tally:
    """Samples and losses of the step under way.

    Args:
        weighted: gradients are summed over workers, not averaged, so weights sum to one.
        together: all workers' samples make one batch; else each weighs its own.
        shards: ranks of one replica that see samples of their own.
    """

    def __init__(self, *, weighted: bool, together: bool, shards: int = 1) -> None:
        self.weighted = weighted
        self.together = together
        self.shards = shards
        self.noted = 0  # batches opened and losses noted, ever
        self.passing = False  # a micro-batch is in the user's hands
        self.clear()

    def clear(self) -> None:
        """A new step; while a micro-batch passes, it is over the same batch (GANs)."""
        self.losses: list[tuple[Tensor, int]] = []
        if self.passing:
            return
        self.mine = self.micro = 0
        self.total: Callable[[], int] = int
        self.guess = 0  # of the total, made without asking; 0: none was needed
        self.known = False
        self.last = False

    def open(self, mine: int, total: Callable[[], int]) -> None:
        """A step over a batch of ``mine`` samples here and ``total()`` everywhere."""
        if self.passing:
            raise UsageError(
                "run.micro (or run.step) inside a loop over run.micro: its samples would be"
                " weighed twice; cut the batch once, with run.micro(batch, parts=...)"
            )
        self.mine, self.total, self.known = mine, total, True
        self.noted += 1

    def note(self, loss: Tensor, samples: int) -> None:
        """The backward of a micro-batch ran."""
        self.losses.append((loss, samples))
        self.noted += 1

    def scale(self, samples: int, workers: int) -> float:
        """Factor of a micro-batch's mean loss, so that agreed gradients are the exact mean."""
        if not self.known:  # a loop of one's own: every worker weighs the same
            return 1 / workers if self.weighted else 1.0
        if not self.together:  # a replica's own batch; torch takes the mean over its shards
            return samples / max(self.total(), 1) * self.shards
        return samples / self.total() * (1 if self.weighted else workers)

    def word(self, *more: tuple[Tensor, int]) -> Word:
        """My word on the step, with losses whose backward is yet to come."""
        losses = [*self.losses, *more]
        loss = sum(float(loss) * samples for loss, samples in losses)
        seen = sum(samples for _, samples in losses)
        bad = not math.isfinite(loss)
        return Word(0.0 if bad else loss, float(seen), 0.0, float(bad))
