"""The contenders of a benchmark, which train the same model on the same data.

A contender is a function that takes a :class:`TrainingTask` and returns a training step. A workload
is a model with a function that returns one random batch. Workers get the names of both and
build them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from shoal.models import gpt, mlp, resnet

STRATEGY = "all_reduce, bsp, wfbp, exact"
_BATCHES = 4

Batch = tuple[Tensor, Tensor]
Step = Callable[[], object]


@dataclass(frozen=True)
class Workload:
    """A model, and a function that draws one batch."""

    model: Callable[[], nn.Module]
    batch: Callable[[Generator], Batch]


@dataclass(frozen=True)
class TrainingTask:
    """The model, optimizer and batches of one contender; all contenders get equal copies."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: tuple[Batch, ...]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy over the last dimension, for images and for tokens."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def _vectors(random: Generator) -> Batch:
    return torch.randn(32, 256, generator=random), torch.randint(10, (32,), generator=random)


def _images(random: Generator) -> Batch:
    x = torch.randn(4, 3, 32, 32, generator=random)
    return x, torch.randint(10, (4,), generator=random)


def _tokens(random: Generator) -> Batch:
    text = torch.randint(256, (4, 65), generator=random)
    return text[:, :-1], text[:, 1:]


# Except for tiny, sizes are such that a step takes some tens of milliseconds on one core.
WORKLOADS = {
    "mlp": Workload(lambda: mlp(256, 10, width=1024, layers=7), _vectors),  # 5.5 M parameters
    "resnet": Workload(lambda: resnet(width=32, depth=2), _images),
    "gpt": Workload(lambda: gpt(256, 64, layers=4, width=192), _tokens),
    "tiny": Workload(lambda: mlp(256, 10, width=16), _vectors),  # for tests
}


def _ddp(task: TrainingTask, *, broadcast_buffers: bool = True) -> Step:
    with warnings.catch_warnings():
        # torch is renaming broadcast_buffers; not all supported versions have the new name
        warnings.simplefilter("ignore", FutureWarning)
        # By default DDP has a first bucket of 1 MB and others of 25 MB, as Shoal has. An explicit
        # bucket_cap_mb=25 would make the first one larger, and DDP would overlap less.
        wrapped = DistributedDataParallel(
            task.model, gradient_as_bucket_view=True, broadcast_buffers=broadcast_buffers
        )
    return _loop(task, wrapped)


def _loop(task: TrainingTask, forward: nn.Module) -> Step:
    feed = cycle(task.batches)

    def step() -> None:
        x, y = next(feed)
        loss(forward(x), y).backward()  # type: ignore[no-untyped-call]
        task.optimizer.step()
        # Gradients are freed at the end of the step, as in run.step. Contenders share a process,
        # and if they freed their gradients at different moments, timings would differ by 2 %.
        task.optimizer.zero_grad()

    return step


def _shoal(task: TrainingTask, *, timeline: bool = True) -> Step:
    import shoal

    feed = cycle(task.batches)
    several = dist.is_initialized() and dist.get_world_size() > 1
    # With a single worker, shoal.distribute allows only the default strategy.
    strategy = STRATEGY if several else None
    run = shoal.distribute(
        task.model, task.optimizer, loss=loss, strategy=strategy, timeline=timeline
    )
    return lambda: run.step(next(feed))


CONTENDERS: dict[str, Callable[[TrainingTask], Step]] = {
    "bare": lambda task: _loop(task, task.model),
    "ddp": _ddp,
    "ddp, local buffers": lambda task: _ddp(task, broadcast_buffers=False),
    "shoal": _shoal,  # the default, which records a timeline
    "shoal, no timeline": lambda task: _shoal(task, timeline=False),
}


def prepare(
    workload: str, contenders: tuple[str, ...], seed: int
) -> tuple[list[Step], Callable[[], object], bool]:
    """Join the group; return each contender's step, a barrier, and whether this is rank 0."""
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if workers > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    steps = [CONTENDERS[name](_task(WORKLOADS[workload], seed, rank)) for name in contenders]
    return steps, dist.barrier if workers > 1 else lambda: None, rank == 0


def _task(workload: Workload, seed: int, rank: int) -> TrainingTask:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # equal parameters on every rank and for every contender
        model = workload.model()
    random = torch.Generator().manual_seed(seed * 1000 + rank)  # different data on every rank
    batches = tuple(workload.batch(random) for _ in range(_BATCHES))
    return TrainingTask(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), batches)
