"""The state of a model and of an optimizer by parameter name, gathered from all ranks or not.

Names instead of numbers, so that a state fits any rank that holds the parameter: another worker, a
pipeline stage on another rank, a server.
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

Named = Mapping[str, Tensor]
State = dict[str, Any]


def model_state(source: ModelPart) -> dict[str, Tensor]:
    """Return the whole model's state; all ranks of a sharded model must call it together."""
    if isinstance(source, ShardedModel):
        from shoal.runtime.parallel import full_state

        return full_state(source.parallel)
    return {plain(n): t for n, t in source.model.state_dict().items() if isinstance(t, Tensor)}


def model_layout(source: ModelPart) -> dict[str, Tensor]:
    """Return the names, shapes and dtypes of :func:`model_state`, without communication."""
    if isinstance(source, ShardedModel):
        entries = source.parallel.entries
        return {e.name: torch.empty(e.shape, dtype=e.dtype, device="meta") for e in entries}
    return model_state(source)


@torch.no_grad()
def load_model(source: ModelPart, state: Named) -> None:
    """Load a whole model's state."""
    if isinstance(source, ShardedModel):
        from shoal.runtime.parallel import load_full

        return load_full(source.parallel, state)
    for name, tensor in source.model.state_dict().items():
        if isinstance(tensor, Tensor):
            tensor.copy_(state[plain(name)])
    return None


def copied(state: Named) -> dict[str, Tensor]:
    """Return a copy of a state; tied tensors stay tied."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    copied_state = {}
    for name, tensor in state.items():
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        key = memory if tensor.numel() else (name,)
        if key not in copies:
            copies[key] = tensor.detach().clone()
        copied_state[name] = copies[key]
    return copied_state


def parameters_of(source: ModelPart) -> dict[str, Tensor]:
    """Return every parameter that this rank holds, frozen ones included."""
    return {plain(name): p for name, p in source.model.named_parameters()}


def optimizer_state(
    optimizer: torch.optim.Optimizer, named: Named, *, whole: bool = False
) -> State:
    """Return an optimizer's state and hyper-parameters, by parameter name.

    With ``whole``, gather what is sharded: all ranks that hold a part must call it together.
    """
    names = _names(optimizer, named)
    state = {
        names[id(p)]: {k: _whole(v) if whole else v for k, v in values.items()}
        for p, values in optimizer.state.items()
        if id(p) in names
    }
    kinds = (bool, int, float, str, type(None), tuple, list, Tensor)
    groups = []
    for group in optimizer.param_groups:
        hyper = {k: v for k, v in group.items() if k != "params" and isinstance(v, kinds)}
        groups.append({**hyper, "params": [names[id(p)] for p in group["params"]]})
    entries: Mapping[Any, Any] = optimizer.state
    extra = {k: v for k, v in entries.items() if isinstance(k, str)}
    return {"kind": type(optimizer).__name__, "state": state, "groups": groups, "extra": extra}


def _whole(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(value, DTensor):
        return value
    placements = list(value.placements)
    for axis in range(len(placements)):  # one axis at a time: all at once, torch warns
        placements[axis] = Replicate()
        value = value.redistribute(placements=placements)
    return value.to_local()


def check_optimizer(optimizer: torch.optim.Optimizer, named: Named, state: State) -> None:
    """Check that a state is this optimizer's, before anything is overwritten.

    Raises:
        CheckpointMismatch: the kind, the groups or the parameters differ; names the first.
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
        own = {names[id(p)] for p in group["params"]}
        saved_names = named.keys() & saved["params"]  # a pipeline stage holds only its own
        if differing := sorted(own ^ saved_names):
            here = "this optimizer, but not of the checkpoint's"
            there = "the checkpoint's optimizer, but not of this one"
            raise CheckpointMismatch(
                f"{differing[0]} is in group {index} of {here if differing[0] in own else there}: "
                "build it as it was when saved"
            )


@torch.no_grad()
def load_optimizer(optimizer: torch.optim.Optimizer, named: Named, state: State) -> None:
    """Replace an optimizer's state and hyper-parameters."""
    names = _names(optimizer, named)
    optimizer.state.clear()
    for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
        for key, value in saved.items():
            current = group.get(key)
            if isinstance(current, Tensor) and isinstance(value, Tensor):
                current.copy_(value)  # in place, as compiled code may refer to it
            elif key != "params":
                group[key] = value
        on_device = bool(group.get("capturable") or group.get("fused"))
        for p in group["params"]:
            values = state["state"].get(names[id(p)])
            if values is not None:
                optimizer.state[p] = {
                    k: _like(p, v, moves=k != "step" or on_device) for k, v in values.items()
                }
    optimizer.state.update(state["extra"])


def _like(parameter: Tensor, value: Any, *, moves: bool) -> Any:
    """Return a copy of a saved value on the parameter's device, sharded as the parameter is."""
    if isinstance(value, list | tuple):  # LBFGS keeps lists
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


def local_buffers(source: ModelPart) -> dict[str, Tensor]:
    """Return this rank's buffers by name, also those that a ``state_dict`` omits."""
    buffers = {plain(n): b for n, b in source.model.named_buffers()}
    if not isinstance(source, ShardedModel):
        return buffers
    from shoal.runtime.parallel.parallelize import local

    return {name: local(b) for name, b in buffers.items()}


def state_form(context: RunContext) -> list[str]:
    """Return what the form of a mode's state depends on: compressor, slices, partition (last)."""
    s = context.strategy
    degrees = f"shard({s.partition.shard}) tensor({s.partition.tensor}) pipe({s.partition.pipe})"
    return [repr(s.compression), repr(s.scheduling) if s.scheduling.slices else "", degrees]


def rank_in_replica(context: RunContext) -> list[int]:
    """Return which part of a replica this rank holds: states of the same part can be averaged."""
    mesh, axes = context.mesh, ("pp", "dp_shard", "tp")
    return [] if mesh is None else [mesh[axis].get_local_rank() for axis in axes]
