"""The wire of a single worker, which answers without communication."""

from __future__ import annotations

from shoal.flow import Ask, alone
from shoal.wire.wire import Pending, Ready


class NullWire:
    """Answers every ask from the worker's own message, so that algorithms run on one worker."""

    size = 1
    blocks = False

    def ask(self, ask: Ask) -> Pending:
        """Return the complete answer."""
        return Ready(alone(ask))

    def leave(self) -> None:
        """Do nothing, because there is no connection to close."""
