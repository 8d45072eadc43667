"""Run micro-batches through a pipeline with torch's schedules, and weight their losses exactly.

The shapes between stages are computed on the blueprint, so torch need not exchange them by pickle.
Consecutive micro-batches of equal shape make one pass through a schedule. A micro-batch of another
shape (often the last one) makes its own pass. The gradients of all passes are added.

References:
    Huang et al., `GPipe <https://arxiv.org/abs/1811.06965>`_, 2019.
    Narayanan et al., `Megatron-LM <https://arxiv.org/abs/2104.04473>`_, 2021: 1F1B, section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from shoal.errors import BadArgument, LayoutMismatch
from shoal.runtime.parallel.stages import Activations, Blueprint, Stage, as_activations

ScheduleName = Literal["1f1b", "gpipe"]
Shape = tuple[tuple[tuple[int, ...], torch.dtype], ...]
Loss = Callable[[Any, Any], Tensor]
SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
CPU = torch.device("cpu")
MAX_SCHEDULES = 4  # how many schedules are kept for reuse, with their buffers


class Pipeline:
    """Runs this rank's stage of a pipeline. All stages of a replica must make the same calls.

    ``schedule`` is ``1f1b`` (of n stages, each stores the activations of at most n micro-batches)
    or ``gpipe`` (all forwards first). Both compute the same gradients. gpipe is always used if
    there are fewer micro-batches than stages.
    """

    def __init__(
        self, stage: Stage, blueprint: Blueprint, *, mesh: DeviceMesh, schedule: str = "1f1b"
    ) -> None:
        self.stage, self.blueprint, self.schedule = stage, blueprint, schedule
        self.group, self.shards = mesh["pp"].get_group(), mesh["dp_shard"]
        self.index, self.count = mesh["pp"].get_local_rank(), mesh["pp"].size()
        on_cuda = mesh.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else CPU
        self._schedules: dict[Any, _PreparedSchedule] = {}

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which computes the loss."""
        return self.index == self.count - 1

    def forward_backward(
        self,
        micro_batches: Sequence[Tensor | Activations],
        targets: Sequence[Any],
        loss_fn: Loss,
        *,
        weights: Sequence[float] | None = None,
    ) -> Tensor:
        """Run forward and backward of all micro-batches, and add to the parameters' gradients.

        Args:
            micro_batches: the inputs, equal on every stage, because each stage needs their shapes.
            targets: one target of any type for each micro-batch. Only the last stage uses targets.
            loss_fn: (output, target) -> scalar tensor, the mean over the samples.
            weights: a factor for each loss. The default is the micro-batch's share of the samples.

        Returns:
            The weighted sum of the losses, in float64, the same on every stage.
        """
        inputs = [as_activations(micro, "an input") for micro in micro_batches]
        samples = [len(micro[0]) for micro in inputs]
        factors = [n / sum(samples) for n in samples] if weights is None else list(weights)
        targets = list(targets)
        if not len(inputs) == len(targets) == len(factors) > 0:
            counts = f"{len(inputs)} micro-batches, {len(targets)} targets, {len(factors)} weights"
            raise BadArgument(
                "forward_backward", f"got {counts}; give as many of each, at least one"
            )
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in self._passes([_shape(micro) for micro in inputs]):
            prepared = self._prepared(inputs[part])
            prepared.loss.set(loss_fn, targets[part], factors[part])
            with _accumulated(self.stage):
                total += self._run(prepared.schedule, inputs[part])
        dist.broadcast(total, group=self.group, group_src=self.count - 1)
        return total

    @torch.no_grad()
    def forward(self, inputs: Tensor | Activations) -> Any:
        """Return the output of the whole model on every stage, without gradients."""
        values = as_activations(inputs, "an input")
        layouts = self.blueprint.activations(values)
        self._set_dtypes(layouts[self.index + 1])
        if self.index > 0:
            values = self._empty(layouts[self.index])
            for tensor in values:
                dist.recv(tensor, group=self.group, group_src=self.index - 1)
        outputs = as_activations(self.stage(*values))
        if not self.is_last:
            for tensor in outputs:
                dist.send(tensor.contiguous(), group=self.group, group_dst=self.index + 1)
            outputs = self._empty(layouts[-1])
        outputs = tuple(tensor.contiguous() for tensor in outputs)
        for tensor in outputs:
            dist.broadcast(tensor, group=self.group, group_src=self.count - 1)
        return outputs if len(outputs) > 1 else outputs[0]

    def _passes(self, shapes: list[Shape]) -> list[slice]:
        """Return slices of consecutive micro-batches with equal shapes. Each slice is one pass.

        ZeRO shards gather parameters together in every pass, so all shards use equal slices.
        """
        new = [i == 0 or shape != shapes[i - 1] for i, shape in enumerate(shapes)]
        if self.shards.size() > 1:
            counts = torch.tensor([len(new), -len(new)], device=self.device)
            dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=self.shards.get_group())
            if (most := int(counts[0])) != (least := -int(counts[1])):
                raise LayoutMismatch(
                    f"the shards of one replica have {least} to {most} micro-batches, but they"
                    f" gather parameters together; instead: give every rank the same number"
                )
            starts = torch.tensor(new, dtype=torch.int64, device=self.device)
            dist.all_reduce(starts, op=dist.ReduceOp.MAX, group=self.shards.get_group())
            new = starts.bool().tolist()
        bounds = [i for i, is_start in enumerate(new) if is_start] + [len(new)]
        return [slice(*pair) for pair in pairwise(bounds)]

    def _run(self, schedule: Any, inputs: list[Activations]) -> Tensor:
        whole = [torch.cat(parts) for parts in zip(*inputs, strict=True)] if not self.index else []
        # torch needs a tensor of targets, but targets may have any type, so it gets indices
        target = torch.arange(len(inputs)) if self.is_last else None
        losses: list[Tensor] = []
        schedule.step(*whole, target=target, losses=losses, return_outputs=False)
        if not losses:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum().double()

    def _prepared(self, inputs: list[Activations]) -> _PreparedSchedule:
        key = (_shape(inputs[0]), len(inputs))
        if key not in self._schedules:
            if len(self._schedules) == MAX_SCHEDULES:  # all stages drop the same one
                self._schedules.pop(next(iter(self._schedules)))
            self._schedules[key] = self._build(inputs[0], count=len(inputs))
        self._set_dtypes(self._schedules[key].outputs)
        return self._schedules[key]

    def _build(self, example: Activations, *, count: int) -> _PreparedSchedule:
        inputs, outputs = self.blueprint.activations(example)[self.index : self.index + 2]
        stage = PipelineStage(
            self.stage, self.index, self.count, self.device, inputs, outputs, group=self.group
        )
        loss = _Loss()
        kind = SCHEDULES["gpipe" if count < self.count else self.schedule]
        return _PreparedSchedule(kind(stage, count, loss_fn=loss, scale_grads=False), loss, outputs)

    def _set_dtypes(self, outputs: Activations) -> None:
        self.stage.dtypes = tuple(t.dtype for t in outputs)

    def _empty(self, like: Activations) -> Activations:
        return tuple(torch.empty_like(t, device=self.device, requires_grad=False) for t in like)


class _Loss:
    """The loss function for torch's schedule, which passes the index of a target as the target."""

    def set(self, loss_fn: Loss, targets: list[Any], weights: list[float]) -> None:
        """Set the loss function, targets and weights of the next pass."""
        self.loss_fn, self.targets, self.weights = loss_fn, targets, weights

    def __call__(self, output: Any, index: Tensor) -> Tensor:
        i = int(index)
        return self.loss_fn(output, self.targets[i]) * self.weights[i]


class _PreparedSchedule(NamedTuple):
    schedule: Any
    loss: _Loss
    outputs: Activations  # the outputs of this stage, as meta tensors


@contextmanager
def _accumulated(module: nn.Module) -> Iterator[None]:
    """Add the gradients of the block to the existing ones. If it raises, the old ones stay.

    torch clears FSDP2's gradients in the first pass of a new schedule. The old gradients are put
    aside in every pass, so that the sums are rounded equally with a new and a reused schedule.
    """
    before = [(p, p.grad) for p in module.parameters() if p.grad is not None]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
        for parameter, grad in before:
            if parameter.grad is not None:
                grad += parameter.grad
    finally:
        for parameter, grad in before:
            parameter.grad = grad


def _shape(tensors: Activations) -> Shape:
    return tuple((tuple(t.shape), t.dtype) for t in tensors)
