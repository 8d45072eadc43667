"""Evaluate the agreed model over a dataset that is divided among the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.runtime.loss import Loss, LossOutput, compute_loss
from shoal.runtime.step.replica import Replica
from shoal.samples.batch import move
from shoal.samples.loader import make
from shoal.samples.options import check_int

Metric = Callable[[Any, Any], Tensor | float]


def accuracy(output: Any, target: Any) -> Tensor:
    """Return the fraction of targets that are the class with the largest score."""
    if isinstance(target, Mapping):
        target = target["labels"]
    if isinstance(output, Mapping) or hasattr(output, "logits"):
        output = output["logits"] if isinstance(output, Mapping) else output.logits
    hits: Tensor = output.argmax(-1) == target
    return hits.double().mean()


@torch.no_grad()
def evaluate(
    replica: Replica,
    dataset: Any,
    batch_size: int,
    *,
    loss: Loss | None,
    metrics: Mapping[str, Metric],
) -> dict[str, float]:
    """Return the mean loss and metrics over a dataset. All ranks must call this together.

    Args:
        replica: the replica whose agreed model is evaluated.
        dataset: a map-style dataset.
        batch_size: the number of samples per batch on all workers together.
        loss: ``(output, target) -> scalar``, or None if the model returns its loss.
        metrics: functions ``(output, target) -> mean over the batch``, by name.
    """
    _check_metrics(metrics)
    context = replica.context
    size = max(check_int("batch_size", batch_size, least=1), context.data_shard.count)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "batch_size=.* exceeds")  # one batch is enough here
        loader = make(dataset, size, share=context.data_shard, shuffle=False)
    names = ["loss", *metrics]
    sums = torch.zeros(len(names) + 1, dtype=torch.float64)
    with replica.agreed(), _evaluating(replica.model):
        for batch in loader:
            if loader.mine == 0 and not context.strategy.partition.cuts:
                continue
            result = compute_loss(replica.model_part.call, move(batch, context.world.device), loss)
            values = [float(result.loss), *(_measure(n, m, result) for n, m in metrics.items())]
            if loader.mine:
                sums += torch.tensor([*values, 1.0], dtype=torch.float64) * loader.mine
    if context.world.size > 1:
        dist.all_reduce(sums)
    return {name: float(value / sums[-1]) for name, value in zip(names, sums[:-1], strict=True)}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """For a block, put the model in evaluation mode. Then restore the mode of each module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check_metrics(metrics: Any) -> None:
    if not isinstance(metrics, Mapping) or not all(map(callable, metrics.values())):
        raise UsageError(f"metrics={metrics!r}: must be functions by name, {{'mae': mae}}")
    if "loss" in metrics:
        raise UsageError("the metric 'loss' is built in: give your metric another name")


def _measure(name: str, metric: Metric, result: LossOutput) -> float:
    value = metric(result.output, result.target)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UsageError(
            f"the metric {name!r} returned a tensor of shape {tuple(value.shape)}, but must return "
            "one number: its mean over the batch"
        )
    return float(value)
