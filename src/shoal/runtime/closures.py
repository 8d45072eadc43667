"""What goes with a closure: an optimizer that computes the loss as often as it likes (LBFGS)."""

from __future__ import annotations

import inspect
from functools import lru_cache

import torch

from shoal.errors import UsageError
from shoal.rules import Facts
from shoal.runtime.settings import Settings
from shoal.strategy import Strategy


@lru_cache(maxsize=8)
def _asks(kind: type) -> bool:
    closure = inspect.signature(kind.step).parameters.get("closure")  # type: ignore[attr-defined]
    return closure is not None and closure.default is inspect.Parameter.empty


def asks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step cannot do without one."""
    return _asks(type(optimizer))  # type: ignore[arg-type]  # a class is hashable


def refuse_without(optimizer: torch.optim.Optimizer) -> None:
    """An update without a closure, of an optimizer that asks for one."""
    if asks(optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} computes the loss itself, several times a step: call "
            "run.update(closure=...), with a function that runs run.forward and run.backward, in "
            "place of run.step"
        )


def refuse(strategy: Strategy, settings: Settings, *, ranks: int) -> None:
    """Check that a closure may be given now: any optimizer takes one, not only those that ask."""
    clips, skips = settings.clip is not None, settings.nonfinite == "skip"
    strategy.bind(Facts(ranks, clips=clips, skips=skips, closure=True))
