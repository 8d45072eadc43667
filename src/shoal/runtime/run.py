"""The loop in the user's hands: ``run.step`` and the pieces it is made of."""

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
from shoal.runtime.loss import Loss, compute_loss, differentiable, differentiate
from shoal.runtime.resume import restore as restoring
from shoal.runtime.resume import save as saving
from shoal.runtime.step import batches as shares
from shoal.runtime.step.batches import How, RunLoader
from shoal.runtime.step.replica import Replica
from shoal.runtime.step.stats import Step, StepStats
from shoal.runtime.step.update import Updater
from shoal.runtime.wires import weighted
from shoal.runtime.world.error_context import ErrorContext
from shoal.samples.batch import move


class Run:
    """Training of one model, or several, on many workers. Made by :func:`shoal.distribute`.

    ``run.step(batch)`` is exactly::

        for micro in run.micro(batch):
            run.backward(run.forward(micro))
        return run.update()
    """

    def __init__(
        self, replicas: Mapping[str, Replica], *, loss: Loss | None, context: RunContext
    ) -> None:
        self.replicas = dict(replicas)
        self.context, self.loss = context, loss
        self.steps = 0
        self.feeds: list[RunLoader] = []
        self.side: Any = None  # a process group beside the gradients', see shares
        self.saved = saving.Saved()
        s, together = context.strategy, rules.sends_gradients(context.strategy)
        self.tally = StepStats(weighted=weighted(s), together=together, shards=s.partition.shard)
        self.updater = Updater(context, self.tally)
        self._closed = False
        self._staged = any(replica.pipeline is not None for replica in self.replicas.values())

    @property
    def rank(self) -> int:
        """My number."""
        return self.context.world.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.context.world.size

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.context.world.is_main

    @property
    def device(self) -> torch.device:
        """Where my tensors live."""
        return self.context.world.device

    @property
    def model(self) -> nn.Module:
        """The model, where there is one."""
        return self._replica(None, "model").model

    def loader(self, dataset: Any, batch_size: int, **options: Any) -> RunLoader:
        """My part of the data: one global order for a seed, whatever the number of workers.

        Args:
            dataset: map-style or iterable.
            batch_size: of all workers together.
            options: epochs, seed, shuffle, drop_last, collate, processes, prefetch, pin_memory,
                augments (see :class:`shoal.samples.Options`).
        """
        feed = RunLoader.made(dataset, batch_size, context=self.context, options=options)
        self.feeds.append(feed)
        saving.place_feed(self, feed)
        return feed

    def step(self, batch: Any) -> Step:
        """Forward, backward, exchange, update."""
        self._refuse_if_closed()
        replica = self._replica(None, "step")
        if self._staged:
            self._pipe(replica, batch)
        else:
            for micro in self.micro(batch):
                self.backward(self.forward(micro))
        return self.update()

    def _pipe(self, replica: Replica, batch: Any) -> None:
        saving.wake(self)
        mine, total = shares.counts(self, batch)
        self.tally.open(mine, total)
        replica.begin(self.steps)
        start = time.perf_counter()
        told = self.context.settings.accumulate
        parts = told if told > 1 else 2 * replica.pipeline.count  # keep the stages busy
        cut = shares.pieces(self, batch, mine, parts)
        scales = [self.tally.scale(n, self.context.data_shard.count) for _, n in cut]
        moved = [move(piece, self.device) for piece, _ in cut]
        loss = replica.source.flow_through(moved, self.loss, scales)
        share = self.context.data_shard.count * mine / total() if self.tally.together else 1.0
        self.tally.losses.append((loss / share if mine else loss, mine))
        self._span("pipeline", start)

    def micro(self, batch: Any, parts: int | None = None) -> Iterator[Any]:
        """Cut my batch into micro-batches; the last one's backward sends gradients as they come.

        Args:
            batch: from ``run.loader``, or my part of a global batch.
            parts: how many; by default as many as ``accumulate`` says.
        """
        self._own_loop("micro")
        saving.wake(self)
        mine, total = shares.counts(self, batch)
        self.tally.open(mine, total)
        for replica in self.replicas.values():
            replica.begin(self.steps)
        pieces = shares.pieces(self, batch, mine, parts or self.context.settings.accumulate)
        for index, (piece, samples) in enumerate(pieces):
            self.tally.micro = samples
            self.tally.last = index == len(pieces) - 1 and len(self.replicas) == 1
            self.tally.passing = True
            try:
                yield move(piece, self.device)
            finally:
                self.tally.passing = False
        self.tally.last = False

    def forward(self, micro: Any) -> Tensor:
        """The loss of a micro-batch: the model's output against its target."""
        self._own_loop("forward")
        start = time.perf_counter()
        loss = compute_loss(self._replica(None, "forward").model, micro, self.loss).loss
        self._span("forward", start)
        return loss

    def backward(self, loss: Tensor, samples: int | None = None) -> None:
        """Add the gradients of a loss, weighted by its samples.

        Args:
            loss: a mean over ``samples``.
            samples: how many; by default those of the micro-batch at hand.
        """
        self._own_loop("backward")
        loss, tally = differentiable(loss), self.tally
        if samples is None:
            samples = tally.micro if tally.known else 1
        scale = tally.scale(samples, self.context.data_shard.count)
        if tally.last:
            for replica in self.replicas.values():
                if replica.engine is not None:
                    replica.arm(partial(tally.word, (loss.detach(), samples)))
            self.updater.look_back()
        start = time.perf_counter()
        with self._explained("gradients"):
            differentiate(loss, scale)
        tally.note(loss.detach(), samples)
        self._span("backward", start)

    def update(
        self, name: str | None = None, *, closure: Callable[[], Tensor] | None = None
    ) -> Step:
        """Agree, clip, update, and forget the gradients.

        Args:
            name: which model, where there are several.
            closure: recomputes the loss and its gradients, for optimizers that ask (LBFGS).
        """
        self._refuse_if_closed()
        replica = self._replica(name, "update")
        with self._explained("update"):
            if closure is not None:
                step = self.updater.closure(replica, closure, self.steps)
            else:
                step = self.updater.update(replica, self.steps)
        self.steps += 1
        for feed in self.feeds:
            feed.number = self.steps
        saving.save_if_due(self)
        if (logger := self.context.settings.logger) is not None and self.is_main:
            logger.log({"loss": step.loss, "samples": step.samples}, step.number)
        return step

    def evaluate(
        self, dataset: Any, batch_size: int = 256, *, metrics: Mapping[str, Metric] | None = None
    ) -> dict[str, float]:
        """Mean loss, and other metrics, of the agreed model over a dataset, shared by all workers.

        Args:
            dataset: map-style.
            batch_size: of all workers together.
            metrics: by name, ``(output, target) -> mean over the batch``; ``accuracy`` is built in:
                pass ``{"accuracy": shoal.accuracy}``.
        """
        with self._explained("evaluate"):
            return evaluate(self, dataset, batch_size, metrics or {})

    def save(self, path: str | PathLike[str] | None = None) -> Path:
        """Write a checkpoint into a directory; ``kill -9`` at any moment leaves the last good one.

        Args:
            path: the directory; by default the run's own (``checkpoint=``).
        """
        with self._explained("save"):
            return saving.save(self, path)

    def restore(self, path: str | PathLike[str] | None = None) -> bool:
        """Take up where the newest good checkpoint of a directory left off.

        Args:
            path: the directory, or one checkpoint in it; by default the run's own.

        Returns:
            Whether there was one. A path given that holds none is an error.
        """
        with self._explained("restore"):
            return restoring.restore_now(self, path)

    def agree(self, value: float | bool, how: How = "mean") -> float:
        """One number that all workers share: for early stopping and the like.

        Args:
            value: mine.
            how: mean, sum, max or min of all workers'.
        """
        return shares.agree(self, value, how)

    def drain(self) -> None:
        """Finish pending updates, so that the model may be read."""
        for replica in self.replicas.values():
            replica.drain()
        self.updater.look_back()

    def close(self) -> None:
        """Drain, save the end where a directory was given, write the timeline, let peers finish."""
        if self._closed:
            return
        self._closed = True
        with self._explained("close"):
            self.drain()
            saving.save_last(self)
            for replica in self.replicas.values():
                replica.leave()
        saving.write_timeline(self)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()

    def _replica(self, name: str | None, call: str) -> Replica:
        if name is None and len(self.replicas) == 1:
            return next(iter(self.replicas.values()))
        if name is None:
            first, *_ = known = list(self.replicas)
            own = "" if call == "update" else "call it yourself, run.backward(loss), then update, "
            which = f"run.{call}: which model of {', '.join(known)}?"
            raise UsageError(f"{which} {own}as in run.update({first!r})")
        if name not in self.replicas:
            raise UnknownName("model", name, self.replicas)
        return self.replicas[name]

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise UsageError(
                "this run is closed, and its peers may be gone: train inside the `with` block, or "
                "call run.close() after the last step (evaluate and save may follow it)"
            )

    def _own_loop(self, piece: str) -> None:
        self._refuse_if_closed()
        if self._staged:
            raise UsageError(
                f"run.{piece} x {self.context.strategy.partition}: because a pipeline interleaves "
                "the forwards and backwards of all its stages itself; instead: run.step(batch)"
            )

    def _span(self, name: str, start: float) -> None:
        self.context.recorder.add(
            "compute", name, start, time.perf_counter() - start, 0, self.steps
        )

    def _explained(self, exchange: str) -> ErrorContext:
        return ErrorContext(self.context.world, self.steps, exchange)
