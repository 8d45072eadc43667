"""What the contenders of ``shoal bench exchange`` train: two models of 10 M parameters, and others.

Batches are small, as they are per worker when many share a global one, so that over gloo at
1 Gbit/s a step of DDP is mostly communication; the suite measures how much, against a threshold.

Schedules are compared on models that compute on a pretended device: their layers compute little and
sleep for the rest of their time. Four workers share two cores here. If their layers computed as
long as their messages take, the threads that pass messages on would wait for a core, and nothing
could overlap, whatever the schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.data import PIXELS, Data, images, text
from shoal.models import gpt, mlp

CONTEXT = 32
FORWARD = 1 / 3  # share of a step's time
Batch = tuple[Tensor, Tensor]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds * (1 - FORWARD)
        time.sleep(seconds * FORWARD)
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(context.seconds)
        return grads[0], None


def with_sleep(model: nn.Module, seconds: float) -> nn.Module:
    """Let the linear layers of a model sleep for ``seconds`` a step together, and return it.

    A layer's share is that of its parameters. A third of it is spent in forward, and the rest in
    backward, before the layer's gradients are computed.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    total = sum(layer.weight.numel() for layer in layers)
    for layer in layers:
        share = seconds * layer.weight.numel() / total

        def sleep(_: nn.Module, inputs: Any, output: Tensor, share: float = share) -> Tensor:
            delayed: Tensor = _Sleep.apply(output, share)  # type: ignore[no-untyped-call]
            return delayed

        layer.register_forward_hook(sleep)
    return model


@dataclass(frozen=True)
class Workload:
    """A model, its data, and how it is trained.

    Attributes:
        model: builds it.
        data: loads its data.
        batch: samples per worker and step.
        held_out: samples of the held-out set that are evaluated, over all workers.
        rate: the learning rate.
        optimizer: ``sgd`` with momentum, or ``adam``, usual for a GPT.
    """

    model: Callable[[], nn.Module]
    data: Callable[[], Data]
    batch: int
    held_out: int
    rate: float
    optimizer: str = "sgd"


def _on_a_device(workload: Workload, seconds: float, batch: int) -> Workload:
    """Return the workload with layers that sleep for ``seconds`` a step."""
    return replace(workload, model=lambda: with_sleep(workload.model(), seconds), batch=batch)


MLP = Workload(
    lambda: mlp(PIXELS**2, 10, width=2048, layers=4),
    images,
    batch=32,
    held_out=160,
    rate=0.05,
)
GPT = Workload(
    lambda: gpt(256, CONTEXT, layers=6, width=384, heads=6),
    lambda: text(CONTEXT),
    batch=1,
    held_out=32,
    rate=1e-4,
    optimizer="adam",
)
WORKLOADS = {
    "mlp": MLP,
    "gpt": GPT,
    # 5 M parameters; at 1 Gbit/s they compute about as long as they communicate: schedules differ
    "deep mlp, on a device": _on_a_device(
        replace(MLP, model=lambda: mlp(PIXELS**2, 10, width=768, layers=9)), 0.25, batch=1
    ),
    "small gpt, on a device": _on_a_device(
        replace(GPT, model=lambda: gpt(256, CONTEXT, layers=6, width=256, heads=4)), 0.25, batch=1
    ),
    "mlp, narrow": Workload(
        lambda: mlp(PIXELS**2, 10, width=1024, layers=4), images, 32, held_out=160, rate=0.05
    ),
    "tiny": Workload(lambda: mlp(PIXELS**2, 10, width=16), images, 8, held_out=40, rate=0.05),
}


@dataclass(frozen=True)
class ContenderTask:
    """One contender's own copy of a model, its optimizer, and this worker's batches."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]


def make(workload: Workload, data: Data, *, seed: int, rank: int) -> ContenderTask:
    """Return a task with equal parameters on all ranks, and samples that differ by rank only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = workload.model()
    random = torch.Generator().manual_seed(1000 * seed + rank)
    return ContenderTask(
        model, _optimizer(workload, model), _batches(data.train, workload.batch, random)
    )


def _optimizer(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    if workload.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=workload.rate, betas=(0.9, 0.95), fused=True)
    return torch.optim.SGD(model.parameters(), lr=workload.rate, momentum=0.9)


def _batches(samples: Batch, size: int, random: torch.Generator) -> Iterator[Batch]:
    x, y = samples
    while True:
        chosen = torch.randint(len(x), (size,), generator=random)
        yield x[chosen], y[chosen]


def held_out(workload: Workload, data: Data, rank: int, workers: int) -> Batch:
    """Return this worker's part of the samples on which the loss is measured."""
    x, y = data.held_out
    return x[rank : workload.held_out : workers], y[rank : workload.held_out : workers]
