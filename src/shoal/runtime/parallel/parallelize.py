"""Partition a model. Every rank builds the whole model, and keeps only its own part.

The parts are applied in this order:

1. **tensor** comes first, because the patterns of a tensor plan name layers of the whole model.
2. **pipe**: each rank keeps one stage, whose parameters keep their names.
3. **shard**: FSDP2 shards the parameters that this rank still has.
4. **optimizer**: its groups get the new parameters.

Errors are raised before the model is changed, except for a tied parameter that the plan splits in
two ways, and for a foreach or fused optimizer.

Tensor ranks and pipeline stages work on the same samples, so their gradients need no averaging.
Each of the n = dp_replicate x dp_shard shards has its own samples. FSDP2 takes the unweighted mean
over ``dp_shard``, and the exchange takes the unweighted mean over ``dp_replicate``. So each
gradient is the unweighted mean over all n. A rank whose loss is the mean over a share ``w`` of all
samples (the shares sum to 1) must scale its loss by ``w * n``. The result is then the mean over all
samples, even if the shares differ.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal.errors import UnknownName, UsageError
from shoal.runtime.parallel import shard, tensor
from shoal.runtime.parallel.pipeline import SCHEDULES, Pipeline, ScheduleName
from shoal.runtime.parallel.stages import Blueprint, Stage, stage_of, stages


class ParameterEntry(NamedTuple):
    """A tensor in the state_dict of the whole model: its name, stage, shape and dtype."""

    name: str
    stage: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class ParallelModel:
    """This rank's part of a model that is partitioned over the ranks of a replica."""

    model: nn.Module  # this rank's part, which is a Stage if there is a pipeline
    mesh: DeviceMesh
    pipeline: Pipeline | None  # calls the stage, or None if ``model`` is called as usual
    entries: tuple[ParameterEntry, ...]  # of the whole model, in the same order on all ranks

    @property
    def replica_group(self) -> ProcessGroup:
        """The process group of the ranks that hold this part in each replica."""
        return self.mesh["dp_replicate"].get_group()

    def local_gradients(self) -> dict[str, Tensor]:
        """Return this rank's part of each gradient, as plain tensors that share its memory."""
        return {n: local(p.grad) for n, p in self.model.named_parameters() if p.grad is not None}

    def local_parameters(self) -> dict[str, Tensor]:
        """Return this rank's part of each parameter, as plain tensors that share its memory."""
        return {name: local(p) for name, p in self.model.named_parameters()}


def parallelize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    mesh: DeviceMesh,
    schedule: ScheduleName = "1f1b",
) -> ParallelModel:
    """Partition ``model`` over ``mesh`` in place. Put this rank's parameters into ``optimizer``.

    All ranks must call this together. ``model`` must be whole, on the mesh's device, and equal on
    every rank. ``optimizer`` must have no state yet. ``schedule`` is used only with a pipeline.

    Raises:
        UsageError: the model or its optimizer cannot be partitioned this way.
    """
    if schedule not in SCHEDULES:
        raise UnknownName("pipeline schedule", schedule, SCHEDULES)
    tp, pp, dp = mesh["tp"], mesh["pp"], mesh["dp_shard"]
    groups = group_names(optimizer, model) if optimizer else []
    styles = tensor.plan(model, tp.size()) if tp.size() > 1 else {}
    parts = stages(model, pp.size()) if pp.size() > 1 else []
    entries = tuple(
        ParameterEntry(name, stage_of(name, parts) or 0, value.shape, value.dtype)
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    )

    blueprint = Blueprint(model, parts) if parts else None
    if styles:
        tensor.apply(model, styles, tp)
    part: nn.Module = model
    pipeline = None
    if blueprint:
        part = stage = Stage(model, parts[pp.get_local_rank()])
        pipeline = Pipeline(stage, blueprint, mesh=mesh, schedule=schedule)
    if dp.size() > 1:
        if styles:  # FSDP2 warns that outputs are views, but nothing writes to them
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        shard.apply(part, dp)
    if optimizer:
        repoint(optimizer, groups, part)
    return ParallelModel(part, mesh, pipeline, entries)


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor as a plain detached tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def group_names(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """Return the parameter names of each optimizer group of a model before partitioning."""
    if optimizer.state:
        raise UsageError(
            f"the optimizer already has state for {len(optimizer.state)} parameters, but a model"
            f" is split before its first step; instead: call distribute first, then load the state"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [group["params"] for group in optimizer.param_groups]
    if foreign := sum(id(p) not in names for group in groups for p in group):
        raise UsageError(
            f"{foreign} parameters of the optimizer are not in the model, so they cannot be split"
            f" with it; instead: give the optimizer only parameters of this model"
        )
    return [[names[id(p)] for p in group] for group in groups]


def repoint(optimizer: Optimizer, groups: list[list[str]], model: nn.Module) -> None:
    """Put the parameters of ``model`` into the optimizer's groups, by their names.

    Groups keep their number, order and options, so that learning-rate schedulers stay valid. With
    a pipeline some groups may become empty.
    """
    parameters = dict(model.named_parameters())
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parameters[name] for name in names if name in parameters]
        kernels = [kernel for kernel in ("foreach", "fused") if group.get(kernel)]
        layouts = {str(getattr(p, "device_mesh", None)) for p in group["params"]}
        if kernels and len(layouts) > 1:
            raise UsageError(
                f"the optimizer cannot use {kernels[0]}=True, because this needs tensors of one"
                f" layout, and this partition has {len(layouts)}; instead: leave {kernels[0]} out"
            )
