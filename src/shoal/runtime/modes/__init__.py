"""What a worker does in a step, chosen by the facts of its strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shoal import rules
from shoal.runtime.agreement import Agreement
from shoal.runtime.flats import Flats
from shoal.runtime.modes.gradient import GradientMode
from shoal.runtime.modes.local import LocalMode
from shoal.runtime.modes.mixing import MixingMode
from shoal.runtime.modes.mode import Apply, Asks, Mode, Parameters
from shoal.runtime.modes.pairs import PairsMode
from shoal.runtime.modes.push import PushMode
from shoal.strategy import Strategy

__all__ = ["Apply", "Asks", "Mode", "Parameters", "Seat", "choose"]


class Seat(NamedTuple):
    """Which worker this is, of how many."""

    worker: int
    workers: int


def choose(
    strategy: Strategy, parameters: Parameters, seat: Seat, collect: Callable[[Agreement], None]
) -> Mode:
    """The mode that a strategy's facts ask for.

    Args:
        strategy: what to do.
        parameters: the trainable ones, in forward order.
        seat: which worker this is.
        collect: puts the gradients of the last backward into an agreement.
    """
    s = strategy
    agreement = Agreement(Flats(parameters), s.scheduling, s.compression)
    if rules.sends_gradients(s):
        return GradientMode(agreement)
    if s.synchrony.waits and s.coordination.sends == "parameter":
        return MixingMode(parameters, agreement, s.synchrony.period)
    if s.synchrony.waits:
        return LocalMode(parameters, agreement, s.synchrony.period)
    if s.coordination.via == "server":
        return PushMode(parameters, agreement, lambda: collect(agreement))
    row = s.coordination.mixing(seat.workers, 0)[seat.worker]
    neighbours = [j for j, w in enumerate(row) if w and j != seat.worker]
    return PairsMode(parameters, neighbours, seed=f"pairs/{seat.worker}")
