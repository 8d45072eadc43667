"""One step of a pipeline: micro-batches through torch's schedules, losses weighted exactly.

Shapes are worked out beforehand on the blueprint, so torch never sends pickled descriptions.
Micro-batches of one shape go through the schedule together; another shape (the last of an uneven
batch) makes a pass of its own, and the gradients add up.

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
from shoal.runtime.parallel.stages import Blueprint, Passed, Stage, as_passed

ScheduleName = Literal["1f1b", "gpipe"]
Shape = tuple[tuple[tuple[int, ...], torch.dtype], ...]
Loss = Callable[[Any, Any], Tensor]
SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
CPU = torch.device("cpu")
KEPT = 4  # schedules of different shapes whose buffers are kept


class Pipeline:
    """This rank's stage, and the others of its replica behind it.

    Args:
        stage: the submodules of this rank.
        blueprint: the whole model, for shapes.
        mesh: all ranks.
        schedule: ``1f1b`` (a stage holds at most n activations) or ``gpipe`` (all forwards first).
            The gradients are the same. Fewer micro-batches than stages always go by gpipe.
    """

    def __init__(
        self, stage: Stage, blueprint: Blueprint, *, mesh: DeviceMesh, schedule: str = "1f1b"
    ) -> None:
        self.stage, self.blueprint, self.schedule = stage, blueprint, schedule
        self.group, self.shards = mesh["pp"].get_group(), mesh["dp_shard"]
        self.index, self.count = mesh["pp"].get_local_rank(), mesh["pp"].size()
        on_cuda = mesh.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else CPU
        self._kept: dict[Any, _Prepared] = {}

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.index == self.count - 1

    def forward_backward(
        self,
        micro_batches: Sequence[Tensor | Passed],
        targets: Sequence[Any],
        loss_fn: Loss,
        *,
        weights: Sequence[float] | None = None,
    ) -> Tensor:
        """Forward and backward of all micro-batches; gradients add to what is there.

        Args:
            micro_batches: inputs, the same on all stages: their shapes are needed everywhere.
            targets: one for each micro-batch, of any type; used on the last stage.
            loss_fn: (output, target) -> scalar, the mean over its samples.
            weights: factor of each loss; by default its share of the samples, so that the sum is
                the mean over all.

        Returns:
            The weighted sum of the losses, in float64, the same on every stage.
        """
        inputs = [as_passed(micro) for micro in micro_batches]
        samples = [len(micro[0]) for micro in inputs]
        factors = [n / sum(samples) for n in samples] if weights is None else list(weights)
        targets = list(targets)
        if not len(inputs) == len(targets) == len(factors) > 0:
            counts = f"{len(inputs)} micro-batches, {len(targets)} targets, {len(factors)} weights"
            raise BadArgument("forward_backward", f"{counts}; give as many of each, at least one")
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in self._passes([_shape(micro) for micro in inputs]):
            made = self._prepared(inputs[part])
            made.loss.set(loss_fn, targets[part], factors[part])
            with _aside(self.stage):
                total += self._run(made.schedule, inputs[part])
        dist.broadcast(total, group=self.group, group_src=self.count - 1)
        return total

    @torch.no_grad()
    def forward(self, inputs: Tensor | Passed) -> Any:
        """The output of the whole model, on every stage; for evaluation."""
        given = as_passed(inputs)
        passed = self.blueprint.passed(given)
        self._announce(passed[self.index + 1])
        here = given if self.index == 0 else self._empty(passed[self.index])
        if self.index > 0:
            for tensor in here:
                dist.recv(tensor, group=self.group, group_src=self.index - 1)
        out = as_passed(self.stage(*here))
        if not self.is_last:
            for tensor in out:
                dist.send(tensor.contiguous(), group=self.group, group_dst=self.index + 1)
            out = self._empty(passed[-1])
        out = tuple(tensor.contiguous() for tensor in out)
        for tensor in out:
            dist.broadcast(tensor, group=self.group, group_src=self.count - 1)
        return out if len(out) > 1 else out[0]

    def _passes(self, shapes: list[Shape]) -> list[slice]:
        """Runs of equal shape; ZeRO shards, whose gathers must meet, agree on where they end."""
        new = [i == 0 or shape != shapes[i - 1] for i, shape in enumerate(shapes)]
        if self.shards.size() > 1:
            agreed = torch.tensor([len(new), -len(new)], device=self.device)
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self.shards.get_group())
            if (most := int(agreed[0])) != (least := -int(agreed[1])):
                raise LayoutMismatch(
                    f"shards of one replica have {least} to {most} micro-batches: because each"
                    f" gathers the others' parameters; instead: as many on every rank"
                )
            starts = torch.tensor(new, dtype=torch.int64, device=self.device)
            dist.all_reduce(starts, op=dist.ReduceOp.MAX, group=self.shards.get_group())
            new = starts.bool().tolist()
        bounds = [i for i, starts_here in enumerate(new) if starts_here] + [len(new)]
        return [slice(*pair) for pair in pairwise(bounds)]

    def _run(self, schedule: Any, inputs: list[Passed]) -> Tensor:
        whole = [torch.cat(parts) for parts in zip(*inputs, strict=True)] if not self.index else []
        # the target is the number of the micro-batch: the real ones may be of any type
        target = torch.arange(len(inputs)) if self.is_last else None
        losses: list[Tensor] = []
        schedule.step(*whole, target=target, losses=losses, return_outputs=False)
        if not losses:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum().double()

    def _prepared(self, inputs: list[Passed]) -> _Prepared:
        key = (_shape(inputs[0]), len(inputs))
        if key not in self._kept:
            if len(self._kept) == KEPT:  # all stages see the same shapes, so drop the same
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = self._build(inputs[0], count=len(inputs))
        self._announce(self._kept[key].outputs)
        return self._kept[key]

    def _build(self, example: Passed, *, count: int) -> _Prepared:
        passed = self.blueprint.passed(example)
        inputs, outputs = passed[self.index : self.index + 2]
        stage = PipelineStage(
            self.stage,
            self.index,
            self.count,
            self.device,
            input_args=inputs,
            output_args=outputs,
            group=self.group,
        )
        loss = _Loss()
        kind = SCHEDULES["gpipe" if count < self.count else self.schedule]
        return _Prepared(kind(stage, count, loss_fn=loss, scale_grads=False), loss, outputs)

    def _announce(self, outputs: Passed) -> None:
        self.stage.dtypes = tuple(t.dtype for t in outputs)

    def _empty(self, like: Passed) -> Passed:
        return tuple(torch.empty_like(t, device=self.device, requires_grad=False) for t in like)


class _Loss:
    """What torch's schedule calls for the loss: finds target and weight by micro-batch number."""

    def set(self, loss_fn: Loss, targets: list[Any], weights: list[float]) -> None:
        """Take what the next pass needs."""
        self.loss_fn, self.targets, self.weights = loss_fn, targets, weights

    def __call__(self, output: Any, number: Tensor) -> Tensor:
        i = int(number)
        return self.loss_fn(output, self.targets[i]) * self.weights[i]


class _Prepared(NamedTuple):
    schedule: Any
    loss: _Loss
    outputs: Passed  # what leaves this stage, without numbers


@contextmanager
def _aside(module: nn.Module) -> Iterator[None]:
    """Add up gradients around a pass: at a schedule's first, torch drops those of FSDP2.

    Around every pass, so that sums round alike whether a schedule is new (after a restart) or not.
    """
    held = [(p, p.grad) for p in module.parameters() if p.grad is not None]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
        for parameter, grad in held:
            if parameter.grad is not None:
                grad += parameter.grad
    finally:  # of a pass that failed nothing is added
        for parameter, grad in held:
            parameter.grad = grad


def _shape(passed: Passed) -> Shape:
    return tuple((tuple(t.shape), t.dtype) for t in passed)
