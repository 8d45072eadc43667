"""Run a script up to its first step, and return its model, optimizer and first batch.

1. The script runs as usual, with ``SHOAL_MODE=capture``. Its data are real tensors with values. Its
   modules are built on the meta device, which needs no memory (:class:`MetaModules`).
2. ``distribute`` returns a :class:`CapturingRun`, whose first step raises :class:`FirstStep`.
3. :func:`capture` catches this exception, and returns model, optimizer and first batch on meta.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from shoal.errors import UsageError
from shoal.runtime.context import RunContext
from shoal.runtime.run import Closure, Run
from shoal.runtime.settings import Settings
from shoal.runtime.step.batches import RunLoader
from shoal.runtime.step.stats import Step
from shoal.runtime.validate import Models
from shoal.runtime.world.env import RankEnv
from shoal.runtime.world.world import World
from shoal.samples.batch import move
from shoal.strategy import Strategy
from shoal.timeline.record import NullRecorder

MODE = "SHOAL_MODE"
META = torch.device("meta")


@dataclass(frozen=True)
class CapturedRun:
    """The arguments that a script passed to ``distribute``, and its first batch.

    All parameters and the batch are on the meta device.
    """

    models: Models
    loss: Any
    batch: Any  # (micro-)batch of the first step, or None if no batch is known
    strategy: Strategy
    settings: Settings


class FirstStep(BaseException):
    """Raised at the first step to end the script. ``except Exception`` does not catch it."""

    def __init__(self, captured: CapturedRun) -> None:
        super().__init__("captured")
        self.captured = captured


def is_capturing() -> bool:
    """Return whether this process captures a script."""
    return os.environ.get(MODE) == "capture"


class CapturingRun(Run):
    """A run whose first call of ``step``, or of one of its parts, raises :class:`FirstStep`."""

    models: Models

    @property
    def model(self) -> nn.Module:
        """The first model that was passed to ``distribute``."""
        return next(iter(self.models.values()))[0]

    def loader(self, dataset: Any, batch_size: int, **options: Any) -> RunLoader:
        """Return a loader as in a run, but without worker processes."""
        return super().loader(dataset, batch_size, **{**options, "processes": 0})

    def step(self, batch: Any) -> Step:
        """End the script."""
        raise self._first_step(batch)

    def micro(self, batch: Any, parts: int | None = None) -> Iterator[Any]:
        """End the script."""
        raise self._first_step(batch)

    def forward(self, micro: Any) -> Tensor:
        """End the script."""
        raise self._first_step(micro)

    def backward(self, loss: Tensor, samples: int | None = None) -> None:
        """End the script."""
        raise self._first_step(self._last_batch())

    def update(self, name: str | None = None, *, closure: Closure | None = None) -> Step:
        """End the script."""
        raise self._first_step(self._last_batch())

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Return NaN for the loss and every metric, because meta tensors have no values."""
        metrics = options.get("metrics") or {}
        return dict.fromkeys(["loss", *metrics], float("nan"))

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Save nothing. Return ``path``; if it is None, ``checkpoint`` of the settings, or "."."""
        return Path(path or self.context.settings.checkpoint or ".")

    def restore(self, path: str | os.PathLike[str] | None = None) -> bool:
        """Restore nothing, and return False."""
        return False

    def close(self) -> None:
        """Do nothing."""

    def _last_batch(self) -> Any:
        batches = [each.loader.last for each in self.loaders if each.loader.last is not None]
        return batches[-1] if batches else None

    def _first_step(self, batch: Any) -> FirstStep:
        strategy, settings = self.context.strategy, self.context.settings
        on_meta = None if batch is None else move(batch, META)
        return FirstStep(CapturedRun(self.models, self.loss, on_meta, strategy, settings))


def capturing_run(models: Models, *, loss: Any, strategy: Strategy, settings: Settings) -> Run:
    """Return the run that ``distribute`` returns while a script is captured."""
    world = World(RankEnv(), META, "none")
    run = CapturingRun({}, loss=loss, context=RunContext(world, strategy, settings, NullRecorder()))
    run.models = models
    return run


def capture(script: str | os.PathLike[str], arguments: Sequence[str] = ()) -> CapturedRun:
    """Run a script with these arguments up to its first step, and return what it captured.

    Raises:
        UsageError: the script does not exist, reads values of its model, or ends without a step.
    """
    name = os.fspath(script)
    if not os.path.isfile(name):
        raise UsageError(f"there is no script at {name!r}: check the path")
    state = torch.get_rng_state()
    try:
        with _as_main(name, arguments), MetaModules():
            runpy.run_path(name, run_name="__main__")
    except FirstStep as end:
        for model, optimizer in end.captured.models.values():
            to_meta(model, optimizer)
        return end.captured
    except SystemExit as end:
        raise UsageError(f"{name} exited with {end.code!r} before its first step") from end
    except RuntimeError as error:
        if "meta tensor" not in str(error):
            raise
        raise UsageError(
            f"{name} reads values of its model before the first step, but while it is captured the "
            "model has none: read them after the first step"
        ) from error
    finally:
        torch.set_rng_state(state)
    raise UsageError(f"{name} ended without a step: does it call shoal.distribute and run.step?")


@contextmanager
def _as_main(script: str, arguments: Sequence[str]) -> Iterator[None]:
    """For a block, set ``sys.argv`` and ``sys.path`` as for a main script, and SHOAL_MODE."""
    argv, path, mode = sys.argv, list(sys.path), os.environ.get(MODE)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    os.environ[MODE] = "capture"
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        del os.environ[MODE]
        if mode is not None:
            os.environ[MODE] = mode


class MetaModules(TorchFunctionMode):
    """While this mode is active, modules are built on the meta device, and stay on it.

    If one argument of a torch function is a meta tensor, the other tensors among the arguments are
    replaced by meta tensors. So a model on the meta device can be called with real data.
    """

    def __init__(self) -> None:
        super().__init__()
        self._constructors = _device_constructors()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, with its device or its tensors replaced by meta where necessary."""
        named = dict(kwargs or {})
        if func in self._constructors:
            device = named.get("device")
            # a module that asks for the CPU explicitly needs the values, to build its layers
            on_cpu = device is not None and torch.device(device).type == "cpu"
            if not on_cpu and _in_module_init():
                named.pop("generator", None)  # meta tensors do not accept a CPU generator
                named["device"] = META
            return func(*args, **named)
        if not any(t.is_meta for t in _tensors((args, named))):
            return func(*args, **named)
        if func in (Tensor.cpu, Tensor.cuda):
            return args[0]
        args, named = _moved(args), _moved(named)
        if func is Tensor.to:
            args = tuple(META if isinstance(a, str | torch.device) else a for a in args)
            named = {k: META if k == "device" else v for k, v in named.items()}
        return func(*args, **named)


def _in_module_init() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back
    return False


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _moved(value: Any) -> Any:
    """Return arguments with all tensors on the meta device, and without generators in dicts."""
    if isinstance(value, Tensor):
        return value if value.is_meta else value.to(META)
    if type(value) in (tuple, list):
        return type(value)(_moved(item) for item in value)
    if isinstance(value, dict):
        return {k: _moved(v) for k, v in value.items() if not isinstance(v, torch.Generator)}
    return value


def to_meta(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Move a model to the meta device, and put the moved parameters into the optimizer."""
    before = dict(model.named_parameters())
    model.to(META)
    moved = {id(before[name]): p for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        group["params"] = [moved.get(id(p), p) for p in group["params"]]
