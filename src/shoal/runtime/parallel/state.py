"""The whole model again: gathered for evaluation and export, and measured for clipping.

Everything here is collective: all ranks of a replica call it together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from shoal.errors import CheckpointMismatch
from shoal.runtime.parallel.parallelize import ParallelModel, local


@torch.no_grad()
def full_state(placed: ParallelModel) -> dict[str, Tensor]:
    """Parameters and buffers of the whole model by name, as plain tensors, on every rank."""
    mine = placed.model.state_dict()
    pp = placed.mesh["pp"]
    full: dict[str, Tensor] = {}
    for name, stage, shape, dtype in placed.entries:
        if stage == pp.get_local_rank():
            value = mine[name]
            full[name] = _whole(value).clone(memory_format=torch.contiguous_format)
        else:
            full[name] = torch.empty(shape, dtype=dtype, device=placed.mesh.device_type)
        if pp.size() > 1:
            dist.broadcast(full[name], group=pp.get_group(), group_src=stage)
    return full


@torch.no_grad()
def load_full(placed: ParallelModel, state: Mapping[str, Tensor]) -> None:
    """Put a whole model's state, equal on all ranks, into the parts; with no traffic."""
    wanted = {entry.name: entry.shape for entry in placed.entries}
    given = {name: value.shape for name, value in state.items()}
    if wanted != given:
        odd = sorted(set(wanted.items()) ^ set(given.items()))
        raise CheckpointMismatch(
            f"state of another model: {len(odd)} names or shapes differ, such as {odd[0][0]};"
            f" give the state of the model that was cut"
        )
    mine = placed.model.state_dict()
    for name in wanted.keys() & mine.keys():
        part = state[name].to(mine[name].device)
        if isinstance(mine[name], DTensor):
            axes, placements = mine[name].device_mesh, mine[name].placements
            part = distribute_tensor(part, axes, placements, src_data_rank=None)
        local(mine[name]).copy_(local(part))


@torch.no_grad()
def global_norm(placed: ParallelModel) -> Tensor:
    """Euclidean norm of all gradients of the replica, the same on each of its ranks, in float64.

    torch's ``clip_grad_norm_`` cannot take the tensors of a model that is cut only in places, nor
    see other stages. Squares are summed here by the axes a gradient is cut over: nothing, shards,
    tensor, both; each kind is added up over its axes, and then over the pipeline.
    """
    squares = torch.zeros(2, 2, dtype=torch.float64, device=placed.mesh.device_type)
    for parameter in placed.model.parameters():
        if (grad := parameter.grad) is not None:
            cut = _axes(grad)
            square = local(grad).double().square().sum()
            squares[int("dp_shard" in cut), int("tp" in cut)] += square
    squares[1] = _sum(squares[1], placed.mesh["dp_shard"])
    squares[:, 1] = _sum(squares[:, 1], placed.mesh["tp"])
    return _sum(squares.sum(), placed.mesh["pp"]).sqrt()


@torch.no_grad()
def clip(placed: ParallelModel, max_norm: float, *, norm: Tensor | float | None = None) -> Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; returns the norm.

    Args:
        placed: the model.
        max_norm: the bound.
        norm: the global norm, if it is known already; must be the same on every rank.
    """
    found = global_norm(placed) if norm is None else torch.as_tensor(norm, dtype=torch.float64)
    scale = float((max_norm / (found + 1e-6)).clamp(max=1.0))  # torch's own formula
    for grad in placed.local_gradients().values():
        grad.mul_(scale)
    return found


def _whole(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value.detach()
    placements = list(value.placements)
    for axis in range(len(placements)):  # one by one: at once, torch warns that it cannot be
        placements[axis] = Replicate()
        value = value.redistribute(placements=placements)
    return local(value)


def _sum(values: Tensor, axis: DeviceMesh) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    if axis.size() > 1:
        dist.all_reduce(total, group=axis.get_group())
    return total


def _axes(grad: Tensor) -> set[str]:
    """The mesh axes over which this gradient is cut, not copied."""
    if not isinstance(grad, DTensor):
        return set()
    names = grad.device_mesh.mesh_dim_names or ()
    return {name for name, p in zip(names, grad.placements, strict=True) if not p.is_replicate()}
