"""A training that can be killed after a step and taken up again, for the tests of resuming."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal.runtime.run import Run
from shoal.testing.processes import outcomes, run_workers

RESUME = {"SHOAL_RESUME": "1"}
SAMPLES, BATCH, EPOCHS = 28, 6, 2  # 5 batches an epoch, the last of 4


class Case(NamedTuple):
    """What to train, and where to stop."""

    strategy: str
    optimizer: str = "adam"
    every: int = 3
    kill_after: int | None = None
    takes_turns: bool = False
    normalises: bool = False


class Trained(NamedTuple):
    """What one worker saw and ended with."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    ids: dict[int, tuple[int, ...]]  # by step
    rate: float
    agreed: dict[str, float]


def data() -> TensorDataset:
    """Points of four classes."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    y = torch.arange(SAMPLES) % 4
    noise = torch.randn(SAMPLES, 12, generator=generator, dtype=torch.float64)
    return TensorDataset(centres[y] + 0.3 * noise, y)


class Classifier(nn.Sequential):
    """A classifier with dropout that says how tensor ranks may cut it."""

    def tensor_plan(self, n: int) -> dict[str, str]:
        """The two outer layers: columns, then rows."""
        *_, middle, _, last = [str(i) for i in range(len(self))]
        return {middle: "column", last: "row"}


def build(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in double precision, the same every time."""
    torch.manual_seed(7)
    extra = [nn.BatchNorm1d(10)] if case.normalises else []
    layers = [nn.Linear(12, 10), *extra, nn.Tanh(), nn.Dropout(0.2), nn.Linear(10, 8), nn.Tanh()]
    model = Classifier(*layers, nn.Linear(8, 4)).double()
    kinds: dict[str, Any] = {
        "sgd": partial(torch.optim.SGD, lr=0.1),
        "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "adam": partial(torch.optim.Adam, lr=0.01),
    }
    return model, kinds[case.optimizer](model.parameters())


def train(case: Case, directory: str) -> Trained:
    """Train to the end, or until killed; resume where the environment says so."""
    model, optimizer = build(case)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)
    run = shoal.distribute(
        model,
        optimizer,
        loss=nn.functional.cross_entropy,
        strategy=case.strategy,
        checkpoint=directory,
        every=case.every,
        stateful={"scheduler": scheduler},
    )
    ids = {}
    with run:
        feed = run.loader(data(), BATCH, epochs=EPOCHS, seed=3)
        for batch in feed:
            with turn(run, case):
                ids[run.steps] = tuple(feed.loader.ids)
                run.step(batch)
                scheduler.step()
            if run.steps == case.kill_after and run.is_main:
                os.kill(os.getpid(), signal.SIGKILL)
        agreed = run.evaluate(data())
        return Trained(
            {n: t.detach().clone() for n, t in held(run).items()},
            {n: b.clone() for n, b in model.named_buffers()},
            ids,
            float(scheduler.get_last_lr()[0]),
            agreed,
        )


def held(run: Run) -> Mapping[str, Tensor]:
    """My parameters, or my part of them."""
    return next(iter(run.replicas.values())).model_part.trainable()


class turn:  # reads as a function
    """One worker after the other, so that asynchronous training is the same every time."""

    def __init__(self, run: Run, case: Case) -> None:
        self.run, self.takes = run, case.takes_turns

    def __enter__(self) -> None:
        for _ in range(self.run.rank if self.takes else 0):
            self.run.agree(0)

    def __exit__(self, *error: object) -> None:
        for _ in range(self.run.size - self.run.rank if self.takes else 0):
            self.run.agree(0)


def uninterrupted(workers: int, case: Case, path: Path, **options: Any) -> list[Trained]:
    """Trained in one go."""
    found: list[Trained] = run_workers(workers, train, case, str(path / "whole"), **options)
    return found


def interrupted(
    workers: int, case: Case, path: Path, *, after: int, again: int | None = None, **options: Any
) -> list[Trained]:
    """Killed after some steps, and resumed, perhaps by another number of workers."""
    directory = str(path / "cut")
    results = outcomes(workers, train, case._replace(kill_after=after), directory, **options)
    assert results[0].exitcode == -signal.SIGKILL, results
    env = {**RESUME, "SHOAL_GENERATION": "1"}
    found: list[Trained] = run_workers(again or workers, train, case, directory, env=env, **options)
    return found


def assert_same(whole: list[Trained], resumed: list[Trained]) -> None:
    """To the bit, worker by worker; the resumed one saw the tail of the same samples."""
    for a, b in zip(whole, resumed, strict=True):
        for name in a.parameters:
            assert torch.equal(a.parameters[name], b.parameters[name]), name
        for name in a.buffers:
            assert torch.equal(a.buffers[name], b.buffers[name]), name
        assert b.ids
        assert {step: a.ids[step] for step in b.ids} == b.ids
        assert a.rate == b.rate
        assert a.agreed == b.agreed
