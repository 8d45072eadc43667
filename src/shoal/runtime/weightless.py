"""Build models without memory: what a module makes for itself is on the meta device.

Data stay real, so that scripts may look at them; whatever meets a weightless tensor becomes
weightless too, so that a model may even be called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

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
