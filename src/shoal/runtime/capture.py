"""Capture: run a script up to its first step, and take what it would train.

The script is run as ever, with ``SHOAL_MODE=capture``. Its data are real, its models are built
without memory, so that one of any size fits. ``distribute`` gives it a stand-in for a run; the
first step ends the script.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.runtime.feed import Feed
from shoal.runtime.join import World
from shoal.runtime.run import Run
from shoal.runtime.settings import Settings
from shoal.runtime.step import Step
from shoal.runtime.team import Team
from shoal.runtime.weightless import META, Weightless, strip
from shoal.samples.batch import move
from shoal.strategy import Strategy
from shoal.timeline.record import NullRecorder

MODE = "SHOAL_MODE"


@dataclass(frozen=True)
class Captured:
    """What a script trains, without a number in it.

    Attributes:
        models: name -> (model, optimizer), on the meta device.
        loss: as given to ``distribute``.
        batch: the first batch, of the global batch size, on the meta device.
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

    models: Mapping[str, tuple[nn.Module, torch.optim.Optimizer]]

    @property
    def model(self) -> nn.Module:
        """The model, where there is one."""
        return next(iter(self.models.values()))[0]

    def loader(self, dataset: Any, batch_size: int, **options: Any) -> Feed:
        """The script's own, read in this process."""
        return super().loader(dataset, batch_size, **{**options, "processes": 0})

    def step(self, batch: Any) -> Step:
        """The first step is the end."""
        raise self._stop(batch)

    def micro(self, batch: Any, parts: int | None = None) -> Iterator[Any]:
        """So is the first micro-batch."""
        raise self._stop(batch)

    def forward(self, micro: Any) -> Tensor:
        """So is a forward of one's own."""
        raise self._stop(micro)

    def backward(self, loss: Tensor, samples: int | None = None) -> None:
        """So is a backward."""
        raise self._stop(self._last())

    def update(
        self, name: str | None = None, *, closure: Callable[[], Tensor] | None = None
    ) -> Step:
        """So is an update."""
        raise self._stop(self._last())

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Nothing is known before the first step."""
        metrics = options.get("metrics") or {}
        return dict.fromkeys(["loss", *metrics], float("nan"))

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Nothing is saved."""
        return Path(path or self.team.settings.checkpoint or ".")

    def restore(self, path: str | os.PathLike[str] | None = None) -> bool:
        """Nothing is restored."""
        return False

    def close(self) -> None:
        """Nothing was opened."""

    def _last(self) -> Any:
        yielded = [feed.loader.last for feed in self.feeds if feed.loader.last is not None]
        return yielded[-1] if yielded else None

    def _stop(self, batch: Any) -> Stop:
        team = self.team
        found = None if batch is None else move(batch, META)
        return Stop(Captured(self.models, self.loss, found, team.strategy, team.settings))


def stand_in(models: Any, *, loss: Any, strategy: Strategy, settings: Settings) -> Run:
    """What ``distribute`` gives a script that is captured."""
    world = World(0, 1, 0, 1, META, "none", None)
    run = StandIn({}, loss=loss, team=Team(world, strategy, settings, NullRecorder()))
    run.models = models
    return run


def capture(script: str | os.PathLike[str], arguments: Sequence[str] = ()) -> Captured:
    """Run a script up to its first step and return what it would train.

    Args:
        script: its path.
        arguments: what it finds in ``sys.argv``.

    Raises:
        UsageError: there is no such script, or it ended without a step.
    """
    name = os.fspath(script)
    if not os.path.isfile(name):
        raise UsageError(f"no script at {name!r}")
    state = torch.get_rng_state()
    try:
        with _as_main(name, arguments), Weightless():
            runpy.run_path(name, run_name="__main__")
    except Stop as stop:
        for model, optimizer in stop.captured.models.values():
            strip(model, optimizer)
        return stop.captured
    except SystemExit as end:
        raise UsageError(f"{name} exited ({end.code}) before its first step") from end
    except RuntimeError as error:
        if "meta tensor" not in str(error):
            raise
        raise UsageError(
            f"{name} reads numbers of its model before the first step, and there are none while it "
            "is captured: move that behind the first step"
        ) from error
    finally:
        torch.set_rng_state(state)
    raise UsageError(f"{name} ended without a step: does it call shoal.distribute and run.step?")


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
