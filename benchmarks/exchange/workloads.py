"""What the contenders of ``shoal bench exchange`` train: two models of 10 M parameters.

Batches are small, as they are per worker when many share a global one, so that over gloo at
1 Gbit/s a step of DDP is mostly communication; the suite measures how much, and has a bar for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shoal.bench.exchange.data import PIXELS, Data, pictures, text
from shoal.bench.exchange.device import elsewhere
from shoal.models import gpt, mlp

CONTEXT = 32
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, its data, and how it is trained.

    Attributes:
        model: makes it.
        data: loads its data.
        batch: samples a worker and step.
        held_out: samples of the held-out set that are evaluated, over all workers.
        rate: the learning rate.
        optimizer: SGD with momentum, or Adam, with which a GPT is usually trained.
    """

    model: Callable[[], nn.Module]
    data: Callable[[], Data]
    batch: int
    held_out: int
    rate: float
    optimizer: str = "sgd"


def _tokens() -> Data:
    return text(CONTEXT)


def _on_a_device(workload: Workload, seconds: float, batch: int) -> Workload:
    """The same, each step ``seconds`` longer in its layers, for which the host sleeps."""
    return replace(workload, model=lambda: elsewhere(workload.model(), seconds), batch=batch)


MLP = Workload(
    lambda: mlp(PIXELS**2, 10, width=2048, layers=4),
    pictures,
    batch=32,
    held_out=160,
    rate=0.05,
)
GPT = Workload(
    lambda: gpt(256, CONTEXT, layers=6, width=384, heads=6),
    _tokens,
    batch=1,
    held_out=32,
    rate=1e-4,
    optimizer="adam",
)
WORKLOADS = {
    "mlp": MLP,
    "gpt": GPT,
    # of 5 M parameters, and take about as long as they communicate at 1 Gbit/s: schedules differ
    "deep mlp, on a device": _on_a_device(
        replace(MLP, model=lambda: mlp(PIXELS**2, 10, width=768, layers=9)), 0.25, batch=1
    ),
    "small gpt, on a device": _on_a_device(
        replace(GPT, model=lambda: gpt(256, CONTEXT, layers=6, width=256, heads=4)), 0.25, batch=1
    ),
    "mlp, narrow": Workload(
        lambda: mlp(PIXELS**2, 10, width=1024, layers=4), pictures, 32, held_out=160, rate=0.05
    ),
    "tiny": Workload(lambda: mlp(PIXELS**2, 10, width=16), pictures, 8, held_out=40, rate=0.05),
}


@dataclass(frozen=True)
class Task:
    """One contender's own copy of a model, its optimizer, and the batches of one worker."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]


def make(workload: Workload, data: Data, *, seed: int, rank: int) -> Task:
    """Equal parameters everywhere; other samples on every rank, the same for every contender."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = workload.model()
    random = torch.Generator().manual_seed(1000 * seed + rank)
    return Task(model, _optimizer(workload, model), _batches(data.train, workload.batch, random))


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
    """This worker's part of what the loss is measured on."""
    x, y = data.held_out
    return x[rank : workload.held_out : workers], y[rank : workload.held_out : workers]
