"""Inside, an error of the network becomes one that names the rank and the exchange."""

from __future__ import annotations

from types import TracebackType

from shoal.runtime.world import failures as alarm
from shoal.runtime.world.join import World


class ErrorContext:
    """``with Explained(world, step, "update"): ...``.

    Args:
        world: all ranks.
        step: the step under way.
        exchange: what is being exchanged, in a word.
    """

    __slots__ = ("_exchange", "_step", "_world")

    def __init__(self, world: World, step: int, exchange: str) -> None:
        self._world, self._step, self._exchange = world, step, exchange

    def __enter__(self) -> None:
        alarm.progress(self._step, self._exchange)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            better = alarm.explain(self._world, error)
            if better is not error:
                raise better from error
        alarm.progress(self._step)  # computing again
