"""Cut a model that every rank holds whole, so that each keeps its part.

The order, and why:

1. **tensor**: patterns name the layers of the whole model.
2. **pipe**: each rank keeps one stage, still under the old names.
3. **shard**: FSDP2 cuts what is left, tensor parts included.
4. **optimizer**: pointed at the parameters that took over.

Everything is checked before anything is changed.

How gradients become exact. Tensor ranks and pipeline stages work on the same samples, and their
gradients need no more averaging. The n = dp_replicate x dp_shard others each see their own: FSDP2
takes the plain mean over ``dp_shard``, the exchange the plain mean over ``dp_replicate``, so each
gradient is the plain mean over all n. A rank whose loss is a mean over ``w`` of all samples (its
share, the shares summing to 1) scales that loss by ``w * n``; the mean is then the exact mean over
all samples, however unevenly they are dealt.
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

from shoal.errors import UnknownName
from shoal.runtime.parallel import optimizer as optimizers
from shoal.runtime.parallel import shard, tensor
from shoal.runtime.parallel.pipeline import SCHEDULES, Pipeline, ScheduleName
from shoal.runtime.parallel.stages import Blueprint, Stage, stage_of, stages


class ParameterEntry(NamedTuple):
    """One entry of the whole model's state: where it lives and how large it is."""

    name: str
    stage: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class ParallelModel:
    """A model cut over the ranks of a worker.

    Args:
        model: what this rank keeps; on a pipeline its stage, whose forward is not the model's.
        mesh: all ranks.
        pipeline: how to run it, on a pipeline; else None, and ``model`` is called as ever.
        entries: the state of the whole model, in order, the same on every rank.
    """

    model: nn.Module
    mesh: DeviceMesh
    pipeline: Pipeline | None
    entries: tuple[ParameterEntry, ...]

    @property
    def replica_group(self) -> ProcessGroup:
        """The ranks that hold the same part of other replicas: who exchanges gradients."""
        return self.mesh["dp_replicate"].get_group()

    def local_gradients(self) -> dict[str, Tensor]:
        """Gradients after backward, as plain tensors that share storage with ``.grad``.

        This rank's part only; parameters without a gradient are left out.
        """
        named = self.model.named_parameters()
        return {name: local(p.grad) for name, p in named if p.grad is not None}

    def local_parameters(self) -> dict[str, Tensor]:
        """This rank's part of each parameter, as plain tensors that share its storage."""
        return {name: local(p) for name, p in self.model.named_parameters()}


def parallelize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    mesh: DeviceMesh,
    schedule: ScheduleName = "1f1b",
) -> ParallelModel:
    """Cut ``model`` as ``mesh`` says and point ``optimizer`` at what this rank keeps.

    The model is changed in place and must hold the same numbers on every rank. The degrees are
    those of the mesh.

    Args:
        model: the whole model, on the device of the mesh.
        optimizer: over its parameters, without state; None if there is none.
        mesh: from :func:`shoal.runtime.parallel.mesh.mesh`.
        schedule: of the pipeline, if there is one.

    Raises:
        UsageError: the model or its optimizer cannot be cut so.
    """
    if schedule not in SCHEDULES:
        raise UnknownName("pipeline schedule", schedule, SCHEDULES)
    tp, pp, dp = mesh["tp"], mesh["pp"], mesh["dp_shard"]
    groups = optimizers.names(optimizer, model) if optimizer else []
    styles = tensor.plan(model, tp.size()) if tp.size() > 1 else {}
    parts = stages(model, pp.size()) if pp.size() > 1 else []
    entries = tuple(
        ParameterEntry(name, stage_of(name, parts) or 0, value.shape, value.dtype)
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    )

    blueprint = Blueprint(model, parts) if parts else None
    if styles:
        tensor.cut(model, styles, tp)
    kept: nn.Module = model
    pipeline = None
    if blueprint:
        kept = stage = Stage(model, parts[pp.get_local_rank()])
        pipeline = Pipeline(stage, blueprint, mesh=mesh, schedule=schedule)
    if dp.size() > 1:
        if styles:
            _expect_views()
        shard.cut(kept, dp)
    if optimizer:
        optimizers.repoint(optimizer, groups, kept)
    return ParallelModel(kept, mesh, pipeline, entries)


def _expect_views() -> None:
    """A gathered output is a view, of which FSDP2 warns at each start; nobody here writes to it."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """This rank's part, without copying."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
