"""The modes of a step, and the function that chooses one for a strategy."""

from __future__ import annotations

from shoal import rules
from shoal.runtime.step.modes.early import EarlyGradients
from shoal.runtime.step.modes.local import LocalMode
from shoal.runtime.step.modes.mixing import MixingMode
from shoal.runtime.step.modes.mode import Apply, Mode, ModeSetup
from shoal.runtime.step.modes.overlapped import OverlappedGradients
from shoal.runtime.step.modes.pairs import PairsMode
from shoal.runtime.step.modes.push import PushMode
from shoal.runtime.step.modes.sequential import SequentialGradients
from shoal.strategy import Strategy

__all__ = ["Apply", "Mode", "ModeSetup", "choose"]


def choose(strategy: Strategy, *, overlaps: bool) -> type[Mode]:
    """Return the mode of the first row in the table whose condition is true.

    Args:
        strategy: the strategy of the run.
        overlaps: whether there are other workers, and gradient hooks can send during backward.
    """
    s = strategy
    waits, gradients = s.synchrony.waits, rules.sends_gradients(s)
    table: tuple[tuple[bool, type[Mode]], ...] = (
        (not waits and s.coordination.via == "server", PushMode),
        (not waits, PairsMode),
        (gradients and overlaps and s.scheduling.early, EarlyGradients),
        (gradients and overlaps, OverlappedGradients),
        (gradients, SequentialGradients),
        (s.coordination.sends == "parameter", MixingMode),
        (True, LocalMode),
    )
    return next(mode for condition, mode in table if condition)
