"""A model's and an optimizer's state by parameter name, whole or cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.errors import CheckpointMismatch
from shoal.runtime.objective import plain
from shoal.runtime.source import Cut, Whole


def model_state(source: Whole | Cut) -> dict[str, Tensor]:
    """The whole model's state; of a model that is cut, gathered (all its ranks call together)."""
    if isinstance(source, Cut):
        from shoal.runtime.partitioned import full_state

        return full_state(source.placed)
    return {plain(n): t for n, t in source.model.state_dict().items() if isinstance(t, Tensor)}


@torch.no_grad()
def load_model(source: Whole | Cut, state: Mapping[str, Tensor]) -> None:
    """Put a whole model's state in place."""
    if isinstance(source, Cut):
        from shoal.runtime.partitioned import load_full

        return load_full(source.placed, state)
    for name, tensor in source.model.state_dict().items():
        if isinstance(tensor, Tensor):
            tensor.copy_(state[plain(name)])
    return None


def optimizer_state(optimizer: torch.optim.Optimizer, source: Whole | Cut) -> dict[str, Any]:
    """State and hyper-parameters, keyed by parameter name."""
    names = _names(optimizer, source)
    state = {names[id(p)]: dict(kept) for p, kept in optimizer.state.items() if id(p) in names}
    groups = [
        {**_hyper(group), "params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    extra = {str(k): v for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
    return {"state": state, "groups": groups, "extra": extra}


def _hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    plain_kinds = (bool, int, float, str, type(None), tuple, list, Tensor)
    return {k: v for k, v in group.items() if k != "params" and isinstance(v, plain_kinds)}


def load_optimizer(
    optimizer: torch.optim.Optimizer, source: Whole | Cut, state: Mapping[str, Any]
) -> None:
    """Put state and hyper-parameters back."""
    if len(state["groups"]) != len(optimizer.param_groups):
        raise CheckpointMismatch(
            f"the checkpoint's optimizer has {len(state['groups'])} parameter groups, this one "
            f"{len(optimizer.param_groups)}: build it as it was when saved"
        )
    names = _names(optimizer, source)
    for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update({k: v for k, v in saved.items() if k != "params"})
        for p in group["params"]:
            kept = state["state"].get(names[id(p)])
            if kept is not None:
                optimizer.state[p] = {k: _like(p, v) for k, v in kept.items()}


def _like(parameter: Tensor, value: Any) -> Any:
    """A saved tensor as this parameter's state: on its device, cut as it is."""
    if not isinstance(value, Tensor):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
        if value.shape != parameter.shape:
            return value.clone()
        whole = value.to(parameter.device)
        mesh, places = parameter.device_mesh, parameter.placements
        return distribute_tensor(whole, mesh, places, src_data_rank=None)
    moves = value.dim() > 0 or parameter.device.type == "cpu"
    return value.to(parameter.device).clone() if moves else value.clone()


def _names(optimizer: torch.optim.Optimizer, source: Whole | Cut) -> dict[int, str]:
    named = {id(p): plain(name) for name, p in source.model.named_parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for place, p in enumerate(group["params"]):
            named.setdefault(id(p), f"group {index} parameter {place}")
    return named
