"""The object that the user's training loop calls: ``run.step``, and its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal import rules
from shoal.errors import UnknownName, UsageError
from shoal.runtime.context import RunContext
from shoal.runtime.evaluate import Metric, evaluate
from shoal.runtime.loss import Loss, compute_loss, differentiable, differentiate, split_target
from shoal.runtime.resume.checkpointer import Checkpointer
from shoal.runtime.step.batches import Batches, How, RunLoader, RunPosition
from shoal.runtime.step.replica import Replica
from shoal.runtime.step.stats import Step, StepStats
from shoal.runtime.step.update import Updater
from shoal.runtime.wires import weighted
from shoal.runtime.world.error_context import ErrorContext
from shoal.samples.batch import move

Closure = Callable[[], Tensor]


class Run:
    """Trains one model or several on many workers. :func:`shoal.distribute` returns a run.

    Without a pipeline, ``run.step(batch)`` is the same as::

        for micro in run.micro(batch):
            run.backward(run.forward(micro))
        return run.update()
    """

    def __init__(
        self, replicas: Mapping[str, Replica], *, loss: Loss | None, context: RunContext
    ) -> None:
        self.replicas = dict(replicas)
        self.context, self.loss = context, loss
        self.position = RunPosition()
        self.batches = Batches(context, self.position)
        self.checkpointer = Checkpointer(context, self.replicas, self.position, drain=self.drain)
        s, together = context.strategy, rules.sends_gradients(context.strategy)
        self.stats = StepStats(weighted=weighted(s), together=together, shards=s.partition.shard)
        self.updater = Updater(context, self.stats)
        self._closed = False
        self._staged = any(r.model_part.pipeline is not None for r in self.replicas.values())

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.context.world.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.context.world.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs."""
        return self.context.world.is_main

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.context.world.device

    @property
    def steps(self) -> int:
        """The number of updates so far, including skipped updates and those before a restore."""
        return self.position.steps

    @property
    def loaders(self) -> list[RunLoader]:
        """The loaders of this run, in the order of their creation."""
        return self.position.loaders

    @property
    def model(self) -> nn.Module:
        """The model. Raises if the run has several models."""
        return self._replica(None, "model").model

    def loader(self, dataset: Any, batch_size: int, **options: Any) -> RunLoader:
        """Return a loader over this rank's part of a dataset. The seed sets the global order.

        Args:
            dataset: a map-style or iterable dataset.
            batch_size: the number of samples per step on all workers together.
            options: epochs, seed, shuffle, drop_last, collate, processes, prefetch, pin_memory,
                augments (see :class:`shoal.samples.LoaderOptions`).
        """
        loader = RunLoader.over(dataset, batch_size, context=self.context, options=options)
        self.checkpointer.add_loader(loader)
        return loader

    def step(self, batch: Any) -> Step:
        """Take one step on this rank's batch: forward, backward, exchange and update."""
        self._refuse_if_closed()
        replica = self._replica(None, "step")
        if self._staged:
            self._run_pipeline(replica, batch)
        else:
            for micro in self.micro(batch):
                self.backward(self.forward(micro))
        return self.update()

    def _open(self, batch: Any) -> int:
        """Start a step on a batch, and return the number of samples on this rank."""
        if self.checkpointer.random_state is not None:
            self.checkpointer.restore_random_state()
        samples, total = self.batches.counts(batch)
        self.stats.open(samples, total)
        for replica in self.replicas.values():
            replica.begin(self.steps)
        return samples

    def _run_pipeline(self, replica: Replica, batch: Any) -> None:
        """Run forward and backward of all micro-batches through the pipeline."""
        pipeline = replica.model_part.pipeline
        if pipeline is None or self.loss is None:
            raise UsageError("a pipeline needs loss=..., because its last stage computes it")
        samples = self._open(batch)
        stats, workers = self.stats, self.context.data_shard.count
        start = time.perf_counter()
        accumulate = self.context.settings.accumulate
        parts = accumulate if accumulate > 1 else 2 * pipeline.count
        pieces = self.batches.split(batch, samples, stats.total, parts)
        scales = [stats.scale(n, workers) for _, n in pieces]
        cut = [split_target(move(piece, self.device)) for piece, _ in pieces]
        inputs = [args if len(args) > 1 else args[0] for args, _ in cut]
        targets = [target for _, target in cut]
        loss = pipeline.forward_backward(inputs, targets, self.loss, weights=scales)
        share = workers * samples / stats.total() if stats.together else 1.0
        stats.losses.append((loss / share if samples else loss, samples))
        self._record("pipeline", start)

    def micro(self, batch: Any, parts: int | None = None) -> Iterator[Any]:
        """Yield the micro-batches of this rank's batch, on this rank's device.

        With one model, gradients may be exchanged during the backward of the last micro-batch.

        Args:
            batch: a batch of ``run.loader``, or this rank's part of a global batch.
            parts: the largest number of micro-batches. The default is ``accumulate``.
        """
        self._refuse_own_loop("micro")
        samples, stats = self._open(batch), self.stats
        parts = parts or self.context.settings.accumulate
        pieces = self.batches.split(batch, samples, stats.total, parts)
        for index, (piece, piece_samples) in enumerate(pieces):
            stats.micro_samples = piece_samples
            stats.last_micro = index == len(pieces) - 1 and len(self.replicas) == 1
            stats.in_micro = True
            try:
                yield move(piece, self.device)
            finally:
                stats.in_micro = False
        stats.last_micro = False

    def forward(self, micro: Any) -> Tensor:
        """Run forward of a micro-batch, and return its loss."""
        self._refuse_own_loop("forward")
        start = time.perf_counter()
        loss = compute_loss(self._replica(None, "forward").model, micro, self.loss).loss
        self._record("forward", start)
        return loss

    def backward(self, loss: Tensor, samples: int | None = None) -> None:
        """Run backward: add the gradients of a loss to ``.grad``, weighted by its samples.

        Args:
            loss: the mean loss over some samples.
            samples: the number of these samples. The default is that of the current micro-batch, or
                1 if this step does not use ``run.micro``.
        """
        self._refuse_own_loop("backward")
        loss, stats = differentiable(loss), self.stats
        if samples is None:
            samples = stats.micro_samples if stats.counted else 1
        scale = stats.scale(samples, self.context.data_shard.count)
        if stats.last_micro:
            for replica in self.replicas.values():
                replica.mode.arm(partial(stats.report, (loss.detach(), samples)))
            self.updater.check_deferred()
        start = time.perf_counter()
        with self._error_context("gradients"):
            differentiate(loss, scale)
        stats.add(loss.detach(), samples)
        self._record("backward", start)

    def update(self, name: str | None = None, *, closure: Closure | None = None) -> Step:
        """End a step: exchange as the strategy says, clip, update, and drop the gradients.

        Args:
            name: the name of the model to update, if there are several.
            closure: a function that computes the loss and its gradients again, for LBFGS.
        """
        self._refuse_if_closed()
        replica = self._replica(name, "update")
        with self._error_context("update"):
            if closure is not None:
                step = self.updater.closure(replica, closure, self.steps)
            else:
                step = self.updater.update(replica, self.steps)
        self.position.steps += 1
        for loader in self.loaders:
            loader.step = self.steps
        settings = self.context.settings
        if settings.checkpoint is not None:
            self.checkpointer.save_if_due()
        if settings.logger is not None and self.is_main:
            settings.logger.log({"loss": step.loss, "samples": step.samples}, step.number)
        return step

    def evaluate(
        self, dataset: Any, batch_size: int = 256, *, metrics: Mapping[str, Metric] | None = None
    ) -> dict[str, float]:
        """Return the mean loss and metrics of the agreed model (the first of several) on a dataset.

        The dataset is divided among the ranks, so all ranks must call this together.

        Args:
            dataset: a map-style dataset.
            batch_size: the number of samples per batch on all workers together.
            metrics: functions ``(output, target) -> mean over the batch`` by name, such as
                ``{"accuracy": shoal.accuracy}``.
        """
        replica = next(iter(self.replicas.values()))
        with self._error_context("evaluate"):
            return evaluate(replica, dataset, batch_size, loss=self.loss, metrics=metrics or {})

    def save(self, path: str | PathLike[str] | None = None) -> Path:
        """Write a checkpoint into ``path``, by default the run's ``checkpoint``. Return its path.

        All ranks must call this together. If a rank is killed during the save, the previous
        checkpoint stays complete.
        """
        with self._error_context("save"):
            return self.checkpointer.save(path)

    def restore(self, path: str | PathLike[str] | None = None) -> bool:
        """Load the newest undamaged checkpoint, and return whether one was loaded.

        Args:
            path: a directory of checkpoints, or one checkpoint. If it has no checkpoint, this
                raises. The default is the run's own directory, which may have no checkpoint.
        """
        with self._error_context("restore"):
            restored = self.checkpointer.restore(path)
            self.checkpointer.restore_random_state(keep=True)
            return restored

    def agree(self, value: float | bool, how: How = "mean") -> float:
        """Return the mean, sum, max or min of all ranks' values. All ranks must call this."""
        return self.batches.reduce(value, how)

    def drain(self) -> None:
        """Finish deferred updates, so that the model can be read."""
        for replica in self.replicas.values():
            replica.mode.drain()
        self.updater.check_deferred()

    def close(self) -> None:
        """Finish updates, save if ``checkpoint`` is set, and end the run on this rank."""
        if self._closed:
            return
        self._closed = True
        with self._error_context("close"):
            self.drain()
            self.checkpointer.save_last()
            for replica in self.replicas.values():
                replica.leave()
        names = ", ".join(type(replica.model).__name__ for replica in self.replicas.values())
        self.context.write_timeline(names)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()

    def _replica(self, name: str | None, call: str) -> Replica:
        if name is None and len(self.replicas) == 1:
            return next(iter(self.replicas.values()))
        if name is None:
            first, *_ = names = list(self.replicas)
            text = f"run.{call} needs one model, but this run has {', '.join(names)}: call"
            own = "" if call == "update" else "the models yourself, run.backward(loss), and then "
            raise UsageError(f"{text} {own}run.update({first!r})")
        if name not in self.replicas:
            raise UnknownName("model", name, self.replicas)
        return self.replicas[name]

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise UsageError(
                "this run is closed, and other workers may have ended: train inside the `with` "
                "block, or call run.close() after the last step (evaluate and save may follow)"
            )

    def _refuse_own_loop(self, call: str) -> None:
        self._refuse_if_closed()
        if self._staged:
            raise UsageError(
                f"run.{call} x {self.context.strategy.partition}: because a pipeline interleaves "
                "the forwards and backwards of all its stages itself; instead: run.step(batch)"
            )

    def _record(self, name: str, start: float) -> None:
        seconds = time.perf_counter() - start
        self.context.recorder.add("compute", name, start, seconds, 0, self.steps)

    def _error_context(self, exchange: str) -> ErrorContext:
        return ErrorContext(self.context.world, self.steps, exchange)
