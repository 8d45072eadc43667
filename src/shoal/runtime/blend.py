"""What several workers remembered, as one memory: for a run that goes on with other workers.

Everybody gets the mean of what the old ones remembered. What reaches the model is the mean of all
workers' residuals, and that stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def mean_of(parts: Sequence[Any]) -> Any:
    """The mean of nested states, tensor by tensor; what is not a float is the first one's.

    What only some hold (the stages of a pipeline) is the mean over those.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        alike = all(isinstance(p, Tensor) and p.shape == first.shape for p in parts)
        if not first.is_floating_point() or not alike or _same(parts):
            return first
        return torch.stack([p.double() for p in parts]).mean(0).to(first.dtype)
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for part in parts for key in part)
        return {key: mean_of([part[key] for part in parts if key in part]) for key in keys}
    if isinstance(first, tuple | list) and all(len(p) == len(first) for p in parts):
        return type(first)(mean_of(list(column)) for column in zip(*parts, strict=True))
    return first


def _same(parts: Sequence[Tensor]) -> bool:
    """Whether nothing needs a mean, which would round."""
    return all(torch.equal(p, parts[0]) for p in parts[1:])


def joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One optimizer's state of several: stages add up, replicas are averaged."""
    first = states[0]
    groups = [
        {**kin[0], "params": list(dict.fromkeys(name for group in kin for name in group["params"]))}
        for kin in zip(*(state["groups"] for state in states), strict=True)
    ]
    return {**first, "groups": groups, "state": mean_of([state["state"] for state in states])}


def moved(value: Any, device: torch.device) -> Any:
    """A nested state on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(moved(item, device) for item in value)
    return value
