"""What one step came to."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from shoal.runtime.control import Table


class Step:
    """One optimizer step of all workers.

    Args:
        number: counted from 0.
        table: what all workers said of it, under way until somebody asks.
        skipped: left out by all workers, for a NaN or inf.
        norm: of the agreed gradient before clipping, where it was measured.
    """

    def __init__(
        self,
        number: int,
        table: Callable[[], Table],
        *,
        skipped: bool = False,
        norm: float | None = None,
    ) -> None:
        self.number = number
        self.skipped = skipped
        self.norm = norm
        self._ask = table

    @cached_property
    def _table(self) -> Table:
        return self._ask()

    @property
    def loss(self) -> float:
        """Mean over the global batch.

        Over my own where workers do not wait for each other, and between the exchanges of
        ``local(h)``.
        """
        return self._table.loss

    @property
    def samples(self) -> int:
        """In the global batch, or in mine as above."""
        return self._table.samples

    def __repr__(self) -> str:
        return f"Step({self.number}, loss={self.loss:.6g}, samples={self.samples})"
