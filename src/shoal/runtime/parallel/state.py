"""Gather and load the state of a partitioned model, and clip its gradients.

Every function is a collective: all ranks of a replica must call it.
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
    """Return the parameters and buffers of the whole model, as plain tensors, on every rank."""
    own = placed.model.state_dict()
    pp = placed.mesh["pp"]
    full: dict[str, Tensor] = {}
    for name, stage, shape, dtype in placed.entries:
        if stage == pp.get_local_rank():
            full[name] = gather_dtensor(own[name]).clone(memory_format=torch.contiguous_format)
        else:
            full[name] = torch.empty(shape, dtype=dtype, device=placed.mesh.device_type)
        if pp.size() > 1:
            dist.broadcast(full[name], group=pp.get_group(), group_src=stage)
    return full


@torch.no_grad()
def load_full(placed: ParallelModel, state: Mapping[str, Tensor]) -> None:
    """Copy a whole model's state, equal on all ranks, into the parts; nothing is sent."""
    expected = {entry.name: entry.shape for entry in placed.entries}
    shapes = {name: value.shape for name, value in state.items()}
    if expected != shapes:
        odd = sorted(set(expected.items()) ^ set(shapes.items()))
        raise CheckpointMismatch(
            f"state of another model: {len(odd)} names or shapes differ, such as {odd[0][0]};"
            f" give the state of the model that was partitioned"
        )
    own = placed.model.state_dict()
    for name in expected.keys() & own.keys():
        target, part = own[name], state[name].to(own[name].device)
        if isinstance(target, DTensor):
            axes, placements = target.device_mesh, target.placements
            part = distribute_tensor(part, axes, placements, src_data_rank=None)
        local(target).copy_(local(part))


@torch.no_grad()
def global_norm(placed: ParallelModel) -> Tensor:
    """Return the L2 norm of all gradients of the replica, equal on each of its ranks, in float64.

    torch's ``clip_grad_norm_`` can neither mix sharded and whole tensors nor see other stages.

    1. Sum squares locally, in one of four cells: gradient split over shards or not, tensor or not.
    2. Add each cell over the axes that its gradients are split over.
    3. Add all over the pipeline.
    """
    squares = torch.zeros(2, 2, dtype=torch.float64, device=placed.mesh.device_type)
    for parameter in placed.model.parameters():
        if (grad := parameter.grad) is not None:
            axes = _split_axes(grad)
            square = local(grad).double().square().sum()
            squares[int("dp_shard" in axes), int("tp" in axes)] += square
    squares[1] = _sum(squares[1], placed.mesh["dp_shard"])
    squares[:, 1] = _sum(squares[:, 1], placed.mesh["tp"])
    return _sum(squares.sum(), placed.mesh["pp"]).sqrt()


@torch.no_grad()
def clip(placed: ParallelModel, max_norm: float, *, norm: float) -> None:
    """Scale all gradients so that their global norm, which is ``norm``, is at most ``max_norm``."""
    ratio = max_norm / (norm + 1e-6)
    scale = 1.0 if ratio > 1 else ratio  # NaN stays NaN, as in clip_grad_norm_
    for grad in placed.local_gradients().values():
        grad.mul_(scale)


def gather_dtensor(value: Tensor) -> Tensor:
    """Return the whole of a DTensor as a plain tensor; a plain tensor as it is, detached."""
    if not isinstance(value, DTensor):
        return value.detach()
    placements = list(value.placements)
    for axis in range(len(placements)):  # one by one: torch warns when it gathers several at once
        placements[axis] = Replicate()
        value = value.redistribute(placements=placements)
    return local(value)


def _sum(values: Tensor, axis: DeviceMesh) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    if axis.size() > 1:
        dist.all_reduce(total, group=axis.get_group())
    return total


def _split_axes(grad: Tensor) -> set[str]:
    """Return the mesh axes over which a gradient is split, not replicated."""
    if not isinstance(grad, DTensor):
        return set()
    names = grad.device_mesh.mesh_dim_names or ()
    return {name for name, p in zip(names, grad.placements, strict=True) if not p.is_replicate()}
