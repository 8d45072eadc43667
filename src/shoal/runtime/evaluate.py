"""Evaluate the agreed model on data shared by all workers, exact to the sample."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.runtime.loss import LossOutput, compute_loss
from shoal.samples.batch import move
from shoal.samples.loader import make
from shoal.samples.options import whole

if TYPE_CHECKING:
    from shoal.runtime.run import Run

Metric = Callable[[Any, Any], Tensor | float]


def accuracy(output: Any, target: Any) -> Tensor:
    """Share of the samples whose largest score is the target's."""
    if isinstance(target, Mapping):
        target = target["labels"]
    if isinstance(output, Mapping) or hasattr(output, "logits"):
        output = output["logits"] if isinstance(output, Mapping) else output.logits
    hits: Tensor = output.argmax(-1) == target
    return hits.double().mean()


@torch.no_grad()
def evaluate(
    run: Run, dataset: Any, batch_size: int, metrics: Mapping[str, Metric]
) -> dict[str, float]:
    """Mean loss and metrics over a dataset, each sample counted once."""
    _check_metrics(metrics)
    size = max(whole("batch_size", batch_size, least=1), run.context.data_shard.count)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "batch_size=.* exceeds")  # one batch may well be all
        loader = make(dataset, size, share=run.context.data_shard, shuffle=False)
    replica = next(iter(run.replicas.values()))
    names = ["loss", *metrics]
    sums = torch.zeros(len(names) + 1, dtype=torch.float64)
    with replica.agreed(), _evaluating(replica.model):
        for batch in loader:
            if loader.mine == 0 and not run.context.strategy.partition.cuts:
                continue
            judged = compute_loss(replica.source.call, move(batch, run.device), run.loss)
            found = [float(judged.loss), *(_measure(n, m, judged) for n, m in metrics.items())]
            if loader.mine:
                values = torch.tensor([*found, 1.0], dtype=torch.float64)
                sums += values * loader.mine
    if run.size > 1:
        dist.all_reduce(sums)
    return {name: float(value / sums[-1]) for name, value in zip(names, sums[:-1], strict=True)}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, no dropout and no new statistics; whatever happens, each module is as it was."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def _check_metrics(metrics: Any) -> None:
    if not isinstance(metrics, Mapping) or not all(map(callable, metrics.values())):
        raise UsageError(f"metrics={metrics!r}: functions by name, as {{'accuracy': accuracy}}")
    if "loss" in metrics:
        raise UsageError("the metric 'loss' is always there: give yours another name")


def _measure(name: str, metric: Metric, judged: LossOutput) -> float:
    value = metric(judged.output, judged.target)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UsageError(
            f"the metric {name!r} has shape {tuple(value.shape)}, not one number: return its mean "
            "over the batch"
        )
    return float(value)
