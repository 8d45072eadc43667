"""What ``shoal bench convergence`` trains: a small MLP on pictures, by workers in lockstep.

A run is a pure function of its task, its contender and its seed: batches, first weights and what
compressors draw by chance all come from the seed, and every contender sees the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from shoal.bench.exchange.data import PIXELS, Data, pictures
from shoal.models import mlp
from shoal.strategy import parse
from shoal.testing.trainer import Batch, LockstepTrainer

CLASSES = 10
Curve = list[tuple[int, float]]
"""(step, held-out accuracy in percent), by rising step."""


@dataclass(frozen=True)
class Task:
    """What is trained, and for how long.

    Attributes:
        data: pictures and classes, as they are.
        workers: how many train together.
        batch: samples a worker and step.
        steps: of training; the learning rate falls to zero over them in a straight line.
        every: steps from one evaluation to the next.
        width: of the hidden layer.
    """

    data: Data
    workers: int = 8
    batch: int = 16
    steps: int = 468
    every: int = 39
    width: int = 64


def task() -> Task:
    """One pass over Fashion-MNIST in global batches of 128; of digits, as many steps."""
    return Task(normal(pictures()))


def normal(data: Data) -> Data:
    """The same pictures with mean 0 and deviation 1 over all numbers to train on."""
    x = data.train[0]
    mean, deviation = x.mean(), x.std()
    held = (data.held_out[0] - mean) / deviation
    return Data(data.source, ((x - mean) / deviation, data.train[1]), (held, data.held_out[1]))


def train(task: Task, strategy: str, *, rate: float, seed: int) -> Curve:
    """How well the agreed model does on what was held out, as training goes on.

    Args:
        task: what is trained.
        strategy: what the workers do, as one types it.
        rate: learning rate of the first step.
        seed: of weights and batches.
    """

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = mlp(PIXELS**2, CLASSES, width=task.width)
        return model, torch.optim.SGD(model.parameters(), lr=rate)

    school = LockstepTrainer(parse(strategy), workers=task.workers, build=build)
    judge, _ = build()
    curve: Curve = []
    for step, batch in enumerate(batches(task, seed)):
        for fish in school.workers:
            fish.optimizer.param_groups[0]["lr"] = rate * (1 - step / task.steps)
        school.step(batch)
        if (step + 1) % task.every == 0 or step + 1 == task.steps:
            nn.utils.vector_to_parameters(school.models().mean(0), judge.parameters())
            curve.append((step + 1, accuracy(judge, task.data.held_out)))
    return curve


def batches(task: Task, seed: int) -> Iterator[Batch]:
    """Global batches, without repetition inside a pass over the data."""
    x, y = task.data.train
    size = task.workers * task.batch
    chance = torch.Generator().manual_seed(seed)
    left = torch.empty(0, dtype=torch.long)
    for _ in range(task.steps):
        if len(left) < size:
            left = torch.randperm(len(y), generator=chance)
        here, left = left[:size], left[size:]
        yield x[here], y[here]


@torch.no_grad()
def accuracy(model: nn.Module, samples: Batch) -> float:
    """Percent of the samples whose class the model tells."""
    x, y = samples
    return 100 * float((model(x).argmax(1) == y).float().mean())
