"""Gather and load the state of a partitioned model, and clip its gradients.

All ranks of a replica must call full_state, global_norm and gather_dtensor together.
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
def full_state(parallel: ParallelModel) -> dict[str, Tensor]:
    """Return a copy of the whole model's state_dict, as plain tensors, on every rank."""
    own = parallel.model.state_dict()
    pp = parallel.mesh["pp"]
    full: dict[str, Tensor] = {}
    for name, stage, shape, dtype in parallel.entries:
        if stage == pp.get_local_rank():
            full[name] = gather_dtensor(own[name]).clone(memory_format=torch.contiguous_format)
        else:
            full[name] = torch.empty(shape, dtype=dtype, device=parallel.mesh.device_type)
        if pp.size() > 1:
            dist.broadcast(full[name], group=pp.get_group(), group_src=stage)
    return full


@torch.no_grad()
def load_full(parallel: ParallelModel, state: Mapping[str, Tensor]) -> None:
    """Copy this rank's part of a whole model's state, equal on all ranks, into its model."""
    expected = {entry.name: entry.shape for entry in parallel.entries}
    shapes = {name: value.shape for name, value in state.items()}
    if expected != shapes:
        odd = sorted({name for name, _ in set(expected.items()) ^ set(shapes.items())})
        raise CheckpointMismatch(
            f"this is the state of another model: {len(odd)} names or shapes differ, such as"
            f" {odd[0]}; load a state of the model that was partitioned"
        )
    own = parallel.model.state_dict()
    for name in expected.keys() & own.keys():
        target, part = own[name], state[name].to(own[name].device)
        if isinstance(target, DTensor):
            axes, placements = target.device_mesh, target.placements
            part = distribute_tensor(part, axes, placements, src_data_rank=None)
        local(target).copy_(local(part))


@torch.no_grad()
def global_norm(parallel: ParallelModel) -> Tensor:
    """Return the L2 norm of all gradients of the replica, equal on each of its ranks, in float64.

    torch's ``clip_grad_norm_`` cannot mix sharded and whole tensors, and sees only this stage.

    1. Add the squares of local gradients to one of four sums, by whether they are split over
       dp_shard and over tp.
    2. All-reduce each sum over the mesh axes that its gradients are split over.
    3. All-reduce the total over the pipeline stages.
    """
    squares = torch.zeros(2, 2, dtype=torch.float64, device=parallel.mesh.device_type)
    for parameter in parallel.model.parameters():
        if (grad := parameter.grad) is not None:
            axes = _split_axes(grad)
            square = local(grad).double().square().sum()
            squares[int("dp_shard" in axes), int("tp" in axes)] += square
    squares[1] = _all_reduce_sum(squares[1], parallel.mesh["dp_shard"])
    squares[:, 1] = _all_reduce_sum(squares[:, 1], parallel.mesh["tp"])
    return _all_reduce_sum(squares.sum(), parallel.mesh["pp"]).sqrt()


@torch.no_grad()
def clip(parallel: ParallelModel, max_norm: float, *, norm: float) -> None:
    """Scale all gradients in place, from their global norm ``norm`` to at most ``max_norm``."""
    ratio = max_norm / (norm + 1e-6)
    scale = 1.0 if ratio > 1 else ratio  # NaN stays NaN, as in clip_grad_norm_
    for grad in parallel.local_gradients().values():
        grad.mul_(scale)


def gather_dtensor(value: Tensor) -> Tensor:
    """Gather a DTensor into a plain tensor. Return any other tensor detached."""
    if not isinstance(value, DTensor):
        return value.detach()
    placements = list(value.placements)
    for axis in range(len(placements)):  # torch warns if several axes change at once
        placements[axis] = Replicate()
        value = value.redistribute(placements=placements)
    return local(value)


def _all_reduce_sum(values: Tensor, axis: DeviceMesh) -> Tensor:
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
