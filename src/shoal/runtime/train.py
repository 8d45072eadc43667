"""``shoal.train``: train a model without writing the loop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.errors import UnknownName
from shoal.runtime.distribute import distribute
from shoal.runtime.loss import Loss
from shoal.runtime.run import Run
from shoal.runtime.settings import Settings
from shoal.samples.options import LoaderOptions

if TYPE_CHECKING:
    from shoal.runtime.step.batches import RunLoader
    from shoal.runtime.step.stats import Step
    from shoal.strategy import Strategy

LOADER = tuple(field.name for field in fields(LoaderOptions))
OPTIONS = (*LOADER, *(field.name for field in fields(Settings)))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    *,
    loss: Loss | None = None,
    batch_size: int = 32,
    strategy: str | Strategy | None = None,
    **options: Any,
) -> Run:
    """Train a model on a dataset, with a progress bar, and return the finished run.

    Args:
        model: the model.
        optimizer: an optimizer of the model's parameters.
        dataset: a map-style or iterable dataset.
        loss: ``(output, target) -> scalar``, or None if the model returns its loss.
        batch_size: the number of samples per step on all workers together.
        strategy: the techniques to use. None means the command line's strategy, or ``auto``.
        options: options of the loader (epochs, seed, ...) and of ``distribute`` (clip, ...).
    """
    for name in options:
        if name not in OPTIONS:
            raise UnknownName("option of train", name, OPTIONS)
    loader_options = {key: options.pop(key) for key in LOADER if key in options}
    run = distribute(model, optimizer, loss=loss, strategy=strategy, **options)
    with run:
        loader = run.loader(dataset, batch_size, **loader_options)
        with progress(run, loader) as show:
            for batch in loader:
                show(run.step(batch))
    return run


@contextmanager
def progress(run: Run, loader: RunLoader) -> Iterator[Callable[[Step], None]]:
    """Show a progress bar on stderr, if this is the main rank and stderr is a terminal.

    Use: ``with progress(run, loader) as show: ... show(step)`` after each step.
    """
    if not (run.is_main and sys.stderr.isatty()):
        yield lambda step: None  # reading step.samples would wait for all workers
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[stats]}"), Left())
    total: int | None = None
    with suppress(TypeError):  # an iterable dataset may have no length
        total = len(loader)
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, completed=run.steps, stats="")
        start, samples = time.perf_counter(), 0

        def show(step: Step) -> None:
            nonlocal samples
            samples += step.samples
            rate = samples / (time.perf_counter() - start)
            stats = f"loss {step.loss:.4f}  {rate:,.0f} samples/s"
            bar.update(task, completed=step.number + 1, stats=stats)

        yield show
