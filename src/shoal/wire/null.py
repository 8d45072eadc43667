"""The wire of one worker: what I say is what all say."""

from __future__ import annotations

from shoal.flow import Ask, alone
from shoal.wire.wire import Pending, Ready


class NullWire:
    """Answers every ask with my own message. World size one is no other code path."""

    size = 1
    blocks = False

    def ask(self, ask: Ask) -> Pending:
        """Answer at once."""
        return Ready(alone(ask))

    def leave(self) -> None:
        """Nothing to say goodbye to."""
