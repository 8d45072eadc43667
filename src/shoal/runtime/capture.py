"""Capture: run a script up to its first step, and take what it would train.

The script is run as ever, with ``SHOAL_MODE=capture``. Its data are real, its models are built
without memory, so that one of any size fits. ``distribute`` gives it a stand-in for a run; the
first step ends the script.

Build models without memory: what a module makes for itself is on the meta device.

Data stay real, so that scripts may look at them; whatever meets a weightless tensor becomes
weightless too, so that a model may even be called.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from shoal.runtime.run import Run
from shoal.runtime.settings import Settings
from shoal.runtime.step.batches import RunLoader
from shoal.runtime.step.stats import Step
from shoal.runtime.world.env import RankEnv
from shoal.runtime.world.world import World
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

    def loader(self, dataset: Any, batch_size: int, **options: Any) -> RunLoader:
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
        return Path(path or self.context.settings.checkpoint or ".")

    def restore(self, path: str | os.PathLike[str] | None = None) -> bool:
        """Nothing is restored."""
        return False

    def close(self) -> None:
        """Nothing was opened."""

    def _last(self) -> Any:
        yielded = [each.loader.last for each in self.loaders if each.loader.last is not None]
        return yielded[-1] if yielded else None

    def _stop(self, batch: Any) -> Stop:
        context = self.context
        found = None if batch is None else move(batch, META)
        return Stop(Captured(self.models, self.loss, found, context.strategy, context.settings))


def stand_in(models: Any, *, loss: Any, strategy: Strategy, settings: Settings) -> Run:
    """What ``distribute`` gives a script that is captured."""
    world = World(RankEnv(), META, "none")
    run = StandIn({}, loss=loss, context=RunContext(world, strategy, settings, NullRecorder()))
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


META = torch.device("meta")


class Weightless(TorchFunctionMode):
    """Inside, modules are built on the meta device, and stay there wherever they are sent."""

    def __init__(self) -> None:
        super().__init__()
        self._makes = _device_constructors()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Send what modules make, and what meets it, to the meta device."""
        named = dict(kwargs or {})
        if func in self._makes:
            if _asked(named.get("device")) and _building():
                named.pop("generator", None)  # one of the CPU cannot draw for another device
                named["device"] = META
            return func(*args, **named)
        if not any(t.is_meta for t in _tensors((args, named))):
            return func(*args, **named)
        if func in (Tensor.cpu, Tensor.cuda):
            return args[0]
        args, named = _sent(args), _sent(named)
        if func is Tensor.to:
            args = tuple(META if _is_device(a) else a for a in args)
            named = {k: META if k == "device" else v for k, v in named.items()}
        return func(*args, **named)


def _asked(device: Any) -> bool:
    """A module that insists on the CPU wants to read what it makes (numbers for its layers)."""
    return device is None or torch.device(device).type != "cpu"


def _building() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back
    return False


def _is_device(value: Any) -> bool:
    return isinstance(value, str | torch.device)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _sent(value: Any) -> Any:
    """The same on the meta device; generators stay behind."""
    if isinstance(value, Tensor):
        return value if value.is_meta else value.to(META)
    if type(value) in (tuple, list):
        return type(value)(_sent(item) for item in value)
    if isinstance(value, dict):
        return {k: _sent(v) for k, v in value.items() if not isinstance(v, torch.Generator)}
    return value


def strip(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take the weight off what was built outside of a module; the optimizer follows."""
    before = dict(model.named_parameters())
    model.to(META)
    taken = {id(before[name]): p for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        group["params"] = [taken.get(id(p), p) for p in group["params"]]
