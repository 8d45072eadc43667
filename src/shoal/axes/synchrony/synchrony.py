"""The class of all synchrony techniques: steps between exchanges, and the bound of staleness."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Synchrony:
    """When a worker waits for others.

    Args:
        name: the text that a user types.
        period: number of optimizer steps from one exchange to the next.
        staleness: rounds that a worker may be ahead of the slowest. With inf it never waits.
    """

    name: str
    period: int = 1
    staleness: float = 0.0

    @property
    def waits(self) -> bool:
        """Return whether all workers end a round together."""
        return self.staleness == 0

    @property
    def free(self) -> bool:
        """Return whether no worker ever waits."""
        return math.isinf(self.staleness)

    def __repr__(self) -> str:
        return self.name
