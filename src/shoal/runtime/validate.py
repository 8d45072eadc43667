"""Check the arguments of ``distribute`` on this rank, without communication."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from shoal.errors import BadArgument, UsageError

Models = Mapping[str, tuple[nn.Module, torch.optim.Optimizer]]


def read_models(model: Any, optimizer: Any) -> Models:
    """Return {name: (model, optimizer)}. Raise if a model or an optimizer is invalid."""
    if isinstance(model, Mapping):
        if optimizer is not None or not model:
            raise UsageError(
                "a dict of models needs at least one entry {name: (model, optimizer)}, and no "
                "separate optimizer"
            )
        for name, pair in model.items():
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                length = f" of {len(pair)}" if isinstance(pair, tuple | list) else ""
                raise UsageError(
                    f"the value of {name!r} is a {type(pair).__name__}{length}, but it must be a "
                    "tuple of two, (model, optimizer)"
                )
        models = {name: (module, used) for name, (module, used) in model.items()}
    else:
        models = {"model": (model, optimizer)}
    for name, (module, used) in models.items():
        _check_pair(module, used)
        _check_hyper_parameters(name, used)
    return models


def check_loss(loss: Any) -> None:
    """Raise if the loss is neither None nor callable."""
    if loss is not None and not callable(loss):
        raise BadArgument(
            f"loss={loss!r}",
            "must be a function (output, target) -> scalar, or None if the model returns its loss",
        )


def _check_pair(module: Any, optimizer: Any) -> None:
    if not isinstance(module, nn.Module):
        raise UsageError(f"distribute needs an nn.Module, not {_kind(module)}")
    if optimizer is None:
        raise UsageError("the optimizer is missing: pass both model and optimizer to distribute")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"distribute needs a torch.optim.Optimizer, not {_kind(optimizer)}")
    if any(isinstance(p, UninitializedParameter) for p in module.parameters()):
        raise UsageError(
            f"{_kind(module)} has lazy parameters, which have no shape yet: run one batch through "
            "it before distribute"
        )
    own = {id(p) for p in module.parameters()}
    if not any(p.requires_grad for p in module.parameters()):
        has = "only frozen parameters: unfreeze some" if own else "no parameters: add some"
        raise UsageError(f"{_kind(module)} has {has}, or do not pass it to distribute")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if foreign := [tuple(p.shape) for p in parameters if id(p) not in own]:
        raise UsageError(
            f"{len(foreign)} of the {len(parameters)} parameters of the {_kind(optimizer)} are not "
            f"in the {_kind(module)} (the first has shape {foreign[0]}): workers would "
            "not average them; build the optimizer from model.parameters(), or make these "
            "parameters part of the model"
        )


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _check_hyper_parameters(name: str, optimizer: torch.optim.Optimizer) -> None:
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            scalar = isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta
            number = float(value) if scalar or isinstance(value, int | float) else 0.0
            if math.isnan(number) or (key == "lr" and (number < 0 or math.isinf(number))):
                raise BadArgument(
                    f"{key}={number} in group {index} of {name}'s optimizer",
                    "must not be NaN, and a learning rate must be finite and >= 0",
                )


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer.step`` requires a closure, as the step of LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
