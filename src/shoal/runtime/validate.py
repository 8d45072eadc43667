"""Check the arguments of ``distribute``, before any other process is contacted."""

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
    """Return one model or several by name, each with an optimizer over its parameters only."""
    if isinstance(model, Mapping):
        if optimizer is not None or not model:
            raise UsageError("pass several models as {name: (model, optimizer)}, and nothing else")
        for name, pair in model.items():
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise UsageError(f"{name!r}: {type(pair).__name__}, not (model, optimizer)")
        models = {name: (module, used) for name, (module, used) in model.items()}
    else:
        models = {"model": (model, optimizer)}
    for name, (module, used) in models.items():
        _check_pair(module, used)
        _check_hyper_parameters(name, used)
    return models


def check_loss(loss: Any) -> None:
    """Refuse a loss that is neither None nor callable."""
    if loss is not None and not callable(loss):
        raise BadArgument(
            f"loss={loss!r}", "a function (output, target) -> scalar, or None for the model's own"
        )


def _check_pair(module: Any, optimizer: Any) -> None:
    if not isinstance(module, nn.Module):
        raise UsageError(f"distribute takes an nn.Module, not {_kind(module)}")
    if optimizer is None:
        raise UsageError("distribute(model, optimizer): the optimizer is missing")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"distribute takes a torch.optim.Optimizer, not {_kind(optimizer)}")
    if any(isinstance(p, UninitializedParameter) for p in module.parameters()):
        raise UsageError(
            f"{_kind(module)} has lazy parameters without a shape yet: run one batch through it "
            "before distribute, so that every worker knows the shapes"
        )
    own = {id(p) for p in module.parameters()}
    if not any(p.requires_grad for p in module.parameters()):
        has = "no trainable parameters: unfreeze some" if own else "no parameters: give it some"
        raise UsageError(f"{_kind(module)} has {has}, or do not train it")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if foreign := [tuple(p.shape) for p in parameters if id(p) not in own]:
        raise UsageError(
            f"{len(foreign)} of the {len(parameters)} parameters of the {_kind(optimizer)} are not "
            f"in the {_kind(module)} (the first has shape {foreign[0]}): they would not be "
            "averaged, and workers would drift apart; build the optimizer from model.parameters(), "
            "or make them part of the model"
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
                    "it must be a finite number, and a learning rate not negative",
                )


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's step requires a closure, as LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
