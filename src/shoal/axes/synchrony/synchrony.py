"""What a synchrony is: steps between exchanges, and how far ahead one may run."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Synchrony:
    """When a worker waits. Equality and repr are by what one types.

    Args:
        name: what one types.
        period: local steps between exchanges.
        staleness: rounds one may be ahead of the slowest; 0 waits for all, inf for none.
    """

    name: str
    period: int = 1
    staleness: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether a round ends for all at once."""
        return self.staleness == 0

    @property
    def free(self) -> bool:
        """Whether nobody ever waits."""
        return math.isinf(self.staleness)

    def __repr__(self) -> str:
        return self.name
