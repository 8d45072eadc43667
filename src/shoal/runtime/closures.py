"""What goes with a closure: an optimizer that computes the loss as often as it likes (LBFGS)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch

from shoal import rules
from shoal.errors import Conflict, ConflictError
from shoal.rules import Facts
from shoal.runtime.settings import Settings
from shoal.strategy import Strategy


def asks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step cannot do without one."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def bind(strategy: Strategy, facts: Facts) -> None:
    """Check a strategy against what a run is made of; raise all conflicts at once."""
    strategy.partition.replicas(facts.ranks)
    if found := [*rules.bound_conflicts(strategy, facts), *_with_settings(facts)]:
        raise ConflictError(found)


def refuse(strategy: Strategy, settings: Settings, *, ranks: int) -> None:
    """Check that a closure may be given now: any optimizer takes one, not only those that ask."""
    clips, skips = settings.clip is not None, settings.nonfinite == "skip"
    bind(strategy, Facts(ranks, clips=clips, skips=skips, closure=True))


def _with_settings(facts: Facts) -> Iterator[Conflict]:
    if facts.closure and facts.clips:
        why = "the optimizer steps on each gradient before anybody could clip it"
        yield Conflict("closure x clip", why, "no clip, or update without a closure")
    if facts.closure and facts.skips:
        why = "the optimizer has moved the model before the step could be left out"
        instead = "nonfinite='stop', or update without a closure"
        yield Conflict("closure x nonfinite='skip'", why, instead)
