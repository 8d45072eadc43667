"""Save and load the state of a model and of an optimizer, by parameter name.

torch numbers the parameters of an optimizer. Names are used here instead, so that any rank that
holds a parameter can load its state: another worker, another pipeline stage, a server. State that
is sharded over ranks can be gathered first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.errors import CheckpointMismatch
from shoal.runtime.context import RunContext
from shoal.runtime.loss import plain
from shoal.runtime.step.model import ModelPart, ShardedModel

NamedTensors = Mapping[str, Tensor]
State = dict[str, Any]


def model_state(model_part: ModelPart) -> dict[str, Tensor]:
    """Return the whole model's state. All ranks of a sharded model must call this together."""
    if isinstance(model_part, ShardedModel):
        from shoal.runtime.parallel import full_state

        return full_state(model_part.parallel)
    return {plain(n): t for n, t in model_part.model.state_dict().items() if isinstance(t, Tensor)}


def model_layout(model_part: ModelPart) -> dict[str, Tensor]:
    """Return {name: tensor of its shape and dtype}. If sharded, these are meta tensors."""
    if isinstance(model_part, ShardedModel):
        entries = model_part.parallel.entries
        return {e.name: torch.empty(e.shape, dtype=e.dtype, device="meta") for e in entries}
    return model_state(model_part)


@torch.no_grad()
def load_model(model_part: ModelPart, state: NamedTensors) -> None:
    """Copy the state that :func:`model_state` returned into the model, in place."""
    if isinstance(model_part, ShardedModel):
        from shoal.runtime.parallel import load_full

        return load_full(model_part.parallel, state)
    for name, tensor in model_part.model.state_dict().items():
        if isinstance(tensor, Tensor):
            tensor.copy_(state[plain(name)])
    return None


def copied(state: NamedTensors) -> dict[str, Tensor]:
    """Return copies of all tensors of a state. Names that share a tensor share a copy."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    copied_state = {}
    for name, tensor in state.items():
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        key = memory if tensor.numel() else (name,)
        if key not in copies:
            copies[key] = tensor.detach().clone()
        copied_state[name] = copies[key]
    return copied_state


def parameters_of(model_part: ModelPart) -> dict[str, Tensor]:
    """Return every parameter that this rank holds by name, including frozen parameters."""
    return {plain(name): p for name, p in model_part.model.named_parameters()}


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: NamedTensors, *, whole: bool = False
) -> State:
    """Return an optimizer's state and hyper-parameters, by parameter name.

    With ``whole``, sharded tensors are gathered, so all ranks that hold a part must call this.
    """
    names = _names(optimizer, parameters)
    state = {
        names[id(p)]: {k: _gather(v) if whole else v for k, v in values.items()}
        for p, values in optimizer.state.items()
        if id(p) in names
    }
    savable_types = (bool, int, float, str, type(None), tuple, list, Tensor)
    groups = []
    for group in optimizer.param_groups:
        hyper = {k: v for k, v in group.items() if k != "params" and isinstance(v, savable_types)}
        groups.append({**hyper, "params": [names[id(p)] for p in group["params"]]})
    entries: Mapping[Any, Any] = optimizer.state
    extra = {k: v for k, v in entries.items() if isinstance(k, str)}
    return {"kind": type(optimizer).__name__, "state": state, "groups": groups, "extra": extra}


def _gather(value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        return value
    from shoal.runtime.parallel.state import gather_dtensor

    return gather_dtensor(value)


def check_optimizer(
    optimizer: torch.optim.Optimizer, parameters: NamedTensors, state: State
) -> None:
    """Raise if a saved state does not fit this optimizer. Change nothing.

    Raises:
        CheckpointMismatch: the class, the groups or their parameters differ.
    """
    kind = type(optimizer).__name__
    if state["kind"] != kind:
        raise CheckpointMismatch(
            f"the checkpoint's optimizer is {state['kind']}, this one is {kind}: "
            "build an optimizer of the class that was saved"
        )
    if len(state["groups"]) != len(optimizer.param_groups):
        raise CheckpointMismatch(
            f"the checkpoint's optimizer has {len(state['groups'])} parameter groups, this one "
            f"{len(optimizer.param_groups)}: build the optimizer with the groups that were saved"
        )
    names = _names(optimizer, parameters)
    groups = zip(optimizer.param_groups, state["groups"], strict=True)
    for index, (group, saved) in enumerate(groups):
        own = {names[id(p)] for p in group["params"]}
        saved_names = parameters.keys() & saved["params"]  # a pipeline stage holds only some
        if differing := sorted(own ^ saved_names):
            owner, other = "this optimizer", "the checkpoint's optimizer"
            if differing[0] not in own:
                owner, other = other, owner
            raise CheckpointMismatch(
                f"{differing[0]} is in group {index} of {owner}, but not in group {index} of "
                f"{other}: build the optimizer with the groups that were saved"
            )


@torch.no_grad()
def load_optimizer(
    optimizer: torch.optim.Optimizer, parameters: NamedTensors, state: State
) -> None:
    """Replace an optimizer's state and hyper-parameters by saved ones, in place."""
    names = _names(optimizer, parameters)
    optimizer.state.clear()
    for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
        for key, value in saved.items():
            current = group.get(key)
            if isinstance(current, Tensor) and isinstance(value, Tensor):
                current.copy_(value)  # in place, because compiled code may refer to this tensor
            elif key != "params":
                group[key] = value
        on_device = bool(group.get("capturable") or group.get("fused"))
        for p in group["params"]:
            values = state["state"].get(names[id(p)])
            if values is not None:
                optimizer.state[p] = {
                    k: _copy_for(p, v, to_device=k != "step" or on_device)
                    for k, v in values.items()
                }
    optimizer.state.update(state["extra"])


def _copy_for(parameter: Tensor, value: Any, *, to_device: bool) -> Any:
    """Return a saved value with its tensors copied.

    With ``to_device``, copies are on the parameter's device. If the parameter is sharded, copies
    with the parameter's shape are sharded in the same way.
    """
    if isinstance(value, list | tuple):  # LBFGS has lists of tensors in its state
        return type(value)(_copy_for(parameter, v, to_device=to_device) for v in value)
    if not isinstance(value, Tensor):
        return value
    if not to_device:
        return value.clone()
    moved = value.to(parameter.device, copy=True)
    if moved.shape != parameter.shape:
        return moved
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return moved
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(moved, mesh, placements, src_data_rank=None)


def _names(optimizer: torch.optim.Optimizer, parameters: NamedTensors) -> dict[int, str]:
    """Return {id(parameter): name}. A parameter outside the model is named by its position."""
    known = {id(p): name for name, p in parameters.items()}
    for index, group in enumerate(optimizer.param_groups):
        for position, p in enumerate(group["params"]):
            known.setdefault(id(p), f"group {index} parameter {position}")
    return known


def local_buffers(model_part: ModelPart) -> dict[str, Tensor]:
    """Return this rank's buffers by name, including buffers outside its ``state_dict``."""
    buffers = {plain(n): b for n, b in model_part.model.named_buffers()}
    if not isinstance(model_part, ShardedModel):
        return buffers
    from shoal.runtime.parallel.parallelize import local

    return {name: local(b) for name, b in buffers.items()}


def state_compatibility_key(context: RunContext) -> list[str]:
    """Return texts that must be the same when a mode's state is saved and when it is loaded.

    They are the compressor, the schedule ("" if it does not slice tensors), and the partition.
    """
    s = context.strategy
    degrees = f"shard({s.partition.shard}) tensor({s.partition.tensor}) pipe({s.partition.pipe})"
    return [repr(s.compression), repr(s.scheduling) if s.scheduling.slices else "", degrees]


def replica_coordinates(context: RunContext) -> list[int]:
    """Return this rank's [pp, dp_shard, tp] in the mesh, or [] if there is no mesh."""
    mesh, axes = context.mesh, ("pp", "dp_shard", "tp")
    return [] if mesh is None else [mesh[axis].get_local_rank() for axis in axes]
