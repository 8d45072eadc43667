"""Capture: run a script on meta tensors up to its first step, and take what it would train.

The script is run as ever, with ``SHOAL_MODE=capture`` and tensors without storage, so that a model
of any size fits. ``distribute`` gives it a stand-in for a run; the first step ends the script.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from shoal.errors import UsageError
from shoal.runtime.join import World
from shoal.runtime.run import Run
from shoal.runtime.settings import Settings
from shoal.runtime.team import Team
from shoal.strategy import Strategy
from shoal.timeline.record import NullRecorder

MODE = "SHOAL_MODE"


@dataclass(frozen=True)
class Captured:
    """What a script trains, without a number in it.

    Attributes:
        models: name -> (model, optimizer), on the meta device.
        loss: as given to ``distribute``.
        batch: the first batch, of the global batch size.
        strategy: the script's own, or auto.
        settings: the script's own.
    """

    models: Mapping[str, tuple[nn.Module, torch.optim.Optimizer]]
    loss: Any
    batch: Any
    strategy: Strategy
    settings: Settings


class Stop(BaseException):
    """Ends the script at its first step; not an Exception, so that scripts do not catch it."""

    def __init__(self, captured: Captured) -> None:
        super().__init__("captured")
        self.captured = captured


def wanted() -> bool:
    """Whether this process captures."""
    return os.environ.get(MODE) == "capture"


class StandIn(Run):
    """A run that ends at its first step."""

    _found: tuple[Any, Any, Strategy, Settings]

    def loader(self, dataset: Any, batch_size: int, **options: Any) -> Any:
        """One batch, of the first samples."""
        collate = options.get("collate") or default_collate
        length = min(batch_size, len(dataset)) if hasattr(dataset, "__len__") else batch_size
        if hasattr(dataset, "__getitem__"):
            return [collate([dataset[i] for i in range(length)])]
        return [collate([sample for sample, _ in zip(dataset, range(length), strict=False)])]

    def micro(self, batch: Any, parts: int | None = None) -> Iterator[Any]:
        """The first micro-batch is the end."""
        models, loss, strategy, settings = self._found
        raise Stop(Captured(models, loss, batch, strategy, settings))

    def step(self, batch: Any) -> Any:
        """The first step is the end."""
        return self.micro(batch)

    def restore(self, path: Any = None) -> bool:
        """Nothing is restored."""
        return False


def stand_in(models: Any, *, loss: Any, strategy: Strategy, settings: Settings) -> Run:
    """What ``distribute`` gives a script that is captured."""
    world = World(0, 1, 0, 1, torch.device("meta"), "none", None)
    run = StandIn({}, loss=loss, team=Team(world, strategy, settings, NullRecorder()))
    run._found = (models, loss, strategy, settings)
    return run


def capture(script: str | os.PathLike[str], arguments: Sequence[str] = ()) -> Captured:
    """Run a script up to its first step and return what it would train.

    Args:
        script: its path.
        arguments: what it finds in ``sys.argv``.
    """
    if not os.path.isfile(script):
        raise UsageError(f"no script at {os.fspath(script)!r}")
    try:
        with _as_main(os.fspath(script), arguments), torch.device("meta"):
            runpy.run_path(os.fspath(script), run_name="__main__")
    except Stop as stop:
        return stop.captured
    raise UsageError(f"{os.fspath(script)} ended without a step: does it call shoal.distribute?")


@contextmanager
def _as_main(script: str, arguments: Sequence[str]) -> Iterator[None]:
    argv, path, mode = sys.argv, list(sys.path), os.environ.get(MODE)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    os.environ[MODE] = "capture"
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        if mode is None:
            del os.environ[MODE]
        else:
            os.environ[MODE] = mode
