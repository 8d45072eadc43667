"""What ``shoal bench convergence`` trains: a small MLP on images, by workers in lockstep.

A run is a pure function of its task, contender and seed: batches, initial weights and the random
numbers of compressors all come from the seed, and every contender has the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.data import PIXELS, Data, images
from shoal.models import mlp
from shoal.strategy import parse
from shoal.testing.trainer import Batch, LockstepTrainer

CLASSES = 10
Curve = list[tuple[int, float]]
"""(step, held-out accuracy in percent), in the order of steps."""


@dataclass(frozen=True)
class ConvergenceTask:
    """What is trained, and for how long.

    Attributes:
        data: images and classes.
        workers: number of workers.
        batch: samples per worker and step.
        steps: of training; the learning rate decreases linearly to zero over them.
        every: steps from one evaluation to the next.
        width: of the hidden layer.
    """

    data: Data
    workers: int = 8
    batch: int = 16
    steps: int = 468
    every: int = 39
    width: int = 64


def default_task() -> ConvergenceTask:
    """Return one pass over Fashion-MNIST in global batches of 128; of digits, as many steps."""
    return ConvergenceTask(normalized(images()))


def normalized(data: Data) -> Data:
    """Return the images with mean 0 and standard deviation 1 over all training numbers."""
    x = data.train[0]
    mean, deviation = x.mean(), x.std()
    held_out = (data.held_out[0] - mean) / deviation
    return Data(data.source, ((x - mean) / deviation, data.train[1]), (held_out, data.held_out[1]))


def train(task: ConvergenceTask, strategy: str, *, rate: float, seed: int) -> Curve:
    """Train, and return the held-out accuracy of the mean of the workers' models.

    Args:
        task: what is trained.
        strategy: of the workers, as one types it.
        rate: learning rate of the first step.
        seed: of weights and batches.
    """

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = mlp(PIXELS**2, CLASSES, width=task.width)
        return model, torch.optim.SGD(model.parameters(), lr=rate)

    trainer = LockstepTrainer(parse(strategy), workers=task.workers, build=build)
    mean_model, _ = build()
    curve: Curve = []
    for step, batch in enumerate(batches(task, seed)):
        for worker in trainer.workers:
            worker.optimizer.param_groups[0]["lr"] = rate * (1 - step / task.steps)
        trainer.step(batch)
        if (step + 1) % task.every == 0 or step + 1 == task.steps:
            nn.utils.vector_to_parameters(trainer.models().mean(0), mean_model.parameters())
            curve.append((step + 1, accuracy(mean_model, task.data.held_out)))
    return curve


def batches(task: ConvergenceTask, seed: int) -> Iterator[Batch]:
    """Yield global batches, without repetition inside a pass over the data."""
    x, y = task.data.train
    size = task.workers * task.batch
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(task.steps):
        if len(order) < size:
            order = torch.randperm(len(y), generator=generator)
        indices, order = order[:size], order[size:]
        yield x[indices], y[indices]


@torch.no_grad()
def accuracy(model: nn.Module, samples: Batch) -> float:
    """Return the percentage of samples that the model classifies correctly."""
    x, y = samples
    return 100 * float((model(x).argmax(1) == y).float().mean())
