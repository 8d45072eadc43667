"""A model's and an optimizer's state by parameter name, whole or cut.

Names, not numbers, so that a state fits whoever holds the parameter: another rank, a pipeline stage
that was elsewhere, a server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.errors import CheckpointMismatch
from shoal.runtime.loss import plain
from shoal.runtime.step.model import ReplicatedModel, ShardedModel

Named = Mapping[str, Tensor]
State = dict[str, Any]


def model_state(source: ReplicatedModel | ShardedModel) -> dict[str, Tensor]:
    """The whole model's state; of a model that is cut, gathered (all its ranks call together)."""
    if isinstance(source, ShardedModel):
        from shoal.runtime.parallel import full_state

        return full_state(source.placed)
    return {plain(n): t for n, t in source.model.state_dict().items() if isinstance(t, Tensor)}


def model_layout(source: ReplicatedModel | ShardedModel) -> dict[str, Tensor]:
    """Names, shapes and dtypes of :func:`model_state`, with no traffic and no memory."""
    if isinstance(source, ShardedModel):
        entries = source.placed.entries
        return {e.name: torch.empty(e.shape, dtype=e.dtype, device="meta") for e in entries}
    return model_state(source)


@torch.no_grad()
def load_model(source: ReplicatedModel | ShardedModel, state: Named) -> None:
    """Put a whole model's state in place."""
    if isinstance(source, ShardedModel):
        from shoal.runtime.parallel import load_full

        return load_full(source.placed, state)
    for name, tensor in source.model.state_dict().items():
        if isinstance(tensor, Tensor):
            tensor.copy_(state[plain(name)])
    return None


def copied(state: Named) -> dict[str, Tensor]:
    """A copy that stays when the model moves on; tied tensors stay tied."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    found = {}
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        key = place if tensor.numel() else (name,)
        if key not in copies:
            copies[key] = tensor.detach().clone()
        found[name] = copies[key]
    return found


def parameters_of(source: ReplicatedModel | ShardedModel) -> dict[str, Tensor]:
    """Every parameter this rank holds, frozen ones too."""
    return {plain(name): p for name, p in source.model.named_parameters()}


def optimizer_state(
    optimizer: torch.optim.Optimizer, named: Named, *, whole: bool = False
) -> State:
    """State and hyper-parameters, keyed by parameter name.

    Args:
        optimizer: over ``named``, and perhaps others.
        named: parameters by name.
        whole: gather what is cut (all ranks that hold a part call together).
    """
    names = _names(optimizer, named)
    state = {
        names[id(p)]: {k: _whole(v) if whole else v for k, v in kept.items()}
        for p, kept in optimizer.state.items()
        if id(p) in names
    }
    groups = [
        {**_hyper(group), "params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    held: Mapping[Any, Any] = optimizer.state
    extra = {k: v for k, v in held.items() if isinstance(k, str)}
    return {"kind": type(optimizer).__name__, "state": state, "groups": groups, "extra": extra}


def _whole(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(value, DTensor):
        return value
    placements = list(value.placements)
    for axis in range(len(placements)):  # one by one: at once, torch warns that it cannot be
        placements[axis] = Replicate()
        value = value.redistribute(placements=placements)
    return value.to_local()


def _hyper(group: Mapping[str, Any]) -> State:
    plain_kinds = (bool, int, float, str, type(None), tuple, list, Tensor)
    return {k: v for k, v in group.items() if k != "params" and isinstance(v, plain_kinds)}


def check_optimizer(optimizer: torch.optim.Optimizer, named: Named, state: State) -> None:
    """Refuse the state of another optimizer, before anything is overwritten.

    Raises:
        CheckpointMismatch: another kind, other groups, other parameters; names the first.
    """
    kind = type(optimizer).__name__
    if state["kind"] != kind:
        raise CheckpointMismatch(
            f"the checkpoint's optimizer is {state['kind']}, this one is {kind}: "
            "build the one that was saved"
        )
    if len(state["groups"]) != len(optimizer.param_groups):
        raise CheckpointMismatch(
            f"the checkpoint's optimizer has {len(state['groups'])} parameter groups, this one "
            f"{len(optimizer.param_groups)}: build it as it was when saved"
        )
    names = _names(optimizer, named)
    groups = zip(optimizer.param_groups, state["groups"], strict=True)
    for index, (group, saved) in enumerate(groups):
        mine = {names[id(p)] for p in group["params"]}
        theirs = {name for name in saved["params"] if name in named}  # stages hold only theirs
        for name in sorted(mine ^ theirs):
            who = "this optimizer, but not of the checkpoint's"
            other = "the checkpoint's optimizer, but not of this one"
            raise CheckpointMismatch(
                f"{name} is in group {index} of {who if name in mine else other}: "
                "build it as it was when saved"
            )


@torch.no_grad()
def load_optimizer(optimizer: torch.optim.Optimizer, named: Named, state: State) -> None:
    """Put state and hyper-parameters back; what there was before is gone."""
    names = _names(optimizer, named)
    optimizer.state.clear()
    for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
        for key, value in saved.items():
            if key != "params":
                _set_hyper(group, key, value)
        on_device = bool(group.get("capturable") or group.get("fused"))
        for p in group["params"]:
            kept = state["state"].get(names[id(p)])
            if kept is not None:
                optimizer.state[p] = {
                    k: _like(p, v, moves=k != "step" or on_device) for k, v in kept.items()
                }
    for key, value in state["extra"].items():
        optimizer.state[key] = value


def _set_hyper(group: dict[str, Any], key: str, value: Any) -> None:
    """A learning rate that is a tensor stays that tensor: compiled code and schedulers hold it."""
    held = group.get(key)
    if isinstance(held, Tensor) and isinstance(value, Tensor):
        held.copy_(value)
    else:
        group[key] = value


def _like(parameter: Tensor, value: Any, *, moves: bool) -> Any:
    """A saved value as this parameter's state: on its device, cut as it is, and not shared."""
    if isinstance(value, list | tuple):  # LBFGS keeps its history in lists
        return type(value)(_like(parameter, v, moves=moves) for v in value)
    if not isinstance(value, Tensor):
        return value
    if not moves:
        return value.clone()
    here = value.to(parameter.device, copy=True)
    if here.shape != parameter.shape:
        return here
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return here
    mesh, places = parameter.device_mesh, parameter.placements
    return distribute_tensor(here, mesh, places, src_data_rank=None)


def _names(optimizer: torch.optim.Optimizer, named: Named) -> dict[int, str]:
    known = {id(p): name for name, p in named.items()}
    for index, group in enumerate(optimizer.param_groups):
        for place, p in enumerate(group["params"]):
            known.setdefault(id(p), f"group {index} parameter {place}")
    return known
