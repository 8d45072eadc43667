"""Partition a model that every rank has whole, so that each rank keeps its part.

The order, and why:

1. **tensor**: the patterns of a tensor plan name layers of the whole model.
2. **pipe**: each rank keeps one stage, with the names of the whole model.
3. **shard**: FSDP2 shards what is left, tensor parts included.
4. **optimizer**: its parameter groups refer to the new parameters.

Everything is checked before anything is changed.

How gradients become exact. Tensor ranks and pipeline stages work on the same samples, so their
gradients need no averaging. The n = dp_replicate x dp_shard others each have their own samples.
FSDP2 takes the plain mean over ``dp_shard``, the exchange the plain mean over ``dp_replicate``, so
each gradient is the plain mean over all n. A rank whose loss is the mean over a share ``w`` of all
samples (the shares sum to 1) scales its loss by ``w * n``; then the mean is exact, however unevenly
the samples are divided.
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
    """A tensor in the state of the whole model: its stage, shape and dtype."""

    name: str
    stage: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class ParallelModel:
    """A model partitioned over the ranks of a worker."""

    model: nn.Module  # this rank's part; on a pipeline its stage, whose forward is not the model's
    mesh: DeviceMesh
    pipeline: Pipeline | None  # runs the model on a pipeline; None if ``model`` is called as usual
    entries: tuple[ParameterEntry, ...]  # the whole model's state, in one order on all ranks

    @property
    def replica_group(self) -> ProcessGroup:
        """The ranks with the same part of other replicas, which exchange gradients."""
        return self.mesh["dp_replicate"].get_group()

    def local_gradients(self) -> dict[str, Tensor]:
        """Return this rank's part of each existing gradient, as plain tensors with its storage."""
        return {n: local(p.grad) for n, p in self.model.named_parameters() if p.grad is not None}

    def local_parameters(self) -> dict[str, Tensor]:
        """Return this rank's part of each parameter, as plain tensors with its storage."""
        return {name: local(p) for name, p in self.model.named_parameters()}


def parallelize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    mesh: DeviceMesh,
    schedule: ScheduleName = "1f1b",
) -> ParallelModel:
    """Partition ``model`` as ``mesh`` says, in place, and update ``optimizer`` to this rank's part.

    The whole model is on the device of the mesh, with equal values on every rank; the optimizer
    has no state yet. ``schedule`` is that of the pipeline, if there is one.

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
        if styles:  # a gathered output is a view; FSDP2 warns of it, but none is written to here
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        shard.apply(part, dp)
    if optimizer:
        repoint(optimizer, groups, part)
    return ParallelModel(part, mesh, pipeline, entries)


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def group_names(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """Return the parameter names of each group, while ``model`` is still whole."""
    if optimizer.state:
        raise UsageError(
            f"the optimizer has state of {len(optimizer.state)} parameters already: because a"
            f" model is split before its first step; instead: call distribute first, then restore"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [group["params"] for group in optimizer.param_groups]
    if foreign := sum(id(p) not in names for group in groups for p in group):
        raise UsageError(
            f"{foreign} parameters of the optimizer are not in the model: because a model is split"
            f" with its optimizer; instead: one optimizer over this model's parameters"
        )
    return [[names[id(p)] for p in group] for group in groups]


def repoint(optimizer: Optimizer, groups: list[list[str]], model: nn.Module) -> None:
    """Put the parameters of ``model`` into the optimizer's groups, by their names.

    Groups keep their number, order and options, so that learning-rate schedulers stay valid. On a
    pipeline some groups may become empty.
    """
    parameters = dict(model.named_parameters())
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parameters[name] for name in names if name in parameters]
        kernels = [kernel for kernel in ("foreach", "fused") if group.get(kernel)]
        layouts = {str(getattr(p, "device_mesh", None)) for p in group["params"]}
        if kernels and len(layouts) > 1:
            raise UsageError(
                f"{kernels[0]}=True in the optimizer: because it takes tensors of one layout, and"
                f" this partition leaves {len(layouts)}; instead: leave {kernels[0]} out"
            )
