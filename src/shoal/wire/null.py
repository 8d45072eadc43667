"""The wire of a single worker: the answer is its own message."""

from __future__ import annotations

from shoal.flow import Ask, alone
from shoal.wire.wire import Pending, Ready


class NullWire:
    """Answers every ask with the worker's own message, so that one worker is no special case."""

    size = 1
    blocks = False

    def ask(self, ask: Ask) -> Pending:
        """Answer at once."""
        return Ready(alone(ask))

    def leave(self) -> None:
        """Do nothing: there is no peer."""
