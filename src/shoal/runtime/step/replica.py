"""One model and its optimizer, and how they come together with their copies elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.axes.compression.kit.stopwatch import Stopwatch
from shoal.errors import UsageError
from shoal.flow import Ask, drive
from shoal.runtime.context import RunContext
from shoal.runtime.remote.client import await_all, take_over
from shoal.runtime.step.buffers import allocator
from shoal.runtime.step.comm_queue import PendingFlow
from shoal.runtime.step.early import EarlyUpdates
from shoal.runtime.step.engine import Engine
from shoal.runtime.step.equalise import agreed, equalise, memory_of, still
from shoal.runtime.step.hooks import Factors, agree_rows, looked_up, watch
from shoal.runtime.step.model import ReplicatedModel, ShardedModel
from shoal.runtime.step.modes import Mode, choose
from shoal.runtime.step.stats import (
    PendingReports,
    StepReport,
    StepReports,
    UnusedParameters,
    find_unused,
    gather_reports,
)
from shoal.runtime.tuning.measure import TracedWire
from shoal.runtime.tuning.replan import Replanning, engine
from shoal.strategy import Strategy
from shoal.wire.server import ServerWire
from shoal.wire.wire import Wire


class Replica:
    """A model that is trained, the optimizer that trains it, and their part of each exchange.

    Args:
        source: the model, whole or cut.
        optimizer: over its parameters.
        context: who else trains it.
        wire: who answers.
    """

    def __init__(
        self,
        source: ReplicatedModel | ShardedModel,
        optimizer: torch.optim.Optimizer,
        *,
        context: RunContext,
        wire: Wire,
    ) -> None:
        self.source = source
        self.model = source.model
        self.optimizer = optimizer
        self.context = context
        self.carrier = wire
        # the servers that hold the model and its only optimizer, until I leave them
        free = not context.strategy.synchrony.waits
        self.served = wire if isinstance(wire, ServerWire) and free else None
        self._settled = False
        self.wire = TracedWire(wire, context.recorder)
        self.engine: Engine | None = None
        self.early: EarlyUpdates | None = None
        self.replanning: Replanning | None = None
        self.factors = Factors(self.model, {})
        self._opened: list[PendingFlow] = []
        self._begun = False
        self.mode: Mode = self._plan()

    @property
    def pipeline(self) -> Any:
        """How the model runs where it is cut into stages; else None."""
        return self.source.pipeline

    @property
    def agrees(self) -> bool:
        """Whether all workers hold the same model now."""
        return self.mode.agrees or self._settled

    def _plan(self) -> Mode:
        """Lay out what travels, from what is trainable now."""
        self._signature, context = self._sign(), self.context
        named = self.source.trainable()
        sparse = looked_up(self.model, context.strategy)
        self.sparse = {name: p for name, p in named.items() if id(p) in sparse}
        self.parameters = {name: p for name, p in named.items() if id(p) not in sparse}
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._graded = [*{id(p): p for p in (*stepped, *self.source.model.parameters())}.values()]
        served = context.strategy.coordination.via == "server"
        # One worker is served by nobody: its own optimizer steps, as in a plain loop.
        asked = Strategy() if served and context.replica_index.workers == 1 else context.strategy
        memory = allocator(asked, context.group, workers=context.replica_index.workers)
        mode = choose(
            asked,
            self.parameters,
            context.replica_index,
            self.source.collect,
            allocate=memory,
            stopwatch=Stopwatch(speaks=context.world.is_main),
        )
        if context.replica_index.workers > 1 and mode.gradients is not None:
            mode.gradients.flats.buffers  # noqa: B018  all ranks take shared memory at one time
        if (
            isinstance(self.source, ReplicatedModel)
            and mode.gradients
            and context.replica_index.workers > 1
        ):
            self.engine, self.replanning = engine(
                mode.gradients, self.wire, parameters=self.parameters, context=context
            )
            self.factors = watch(self.model, self.parameters, mode.gradients)
            if context.strategy.scheduling.early:
                self.early = EarlyUpdates(self.model, self.optimizer, self.engine)
        return mode

    def _sign(self) -> list[bool]:
        """What is trainable: a parameter that joins makes it longer, one frozen flips it."""
        return [p.requires_grad for group in self.optimizer.param_groups for p in group["params"]]

    def replan(self) -> None:
        """Lay out anew if parameters joined or were frozen; what is remembered stays."""
        if self._sign() == self._signature:
            return
        if not self.context.strategy.synchrony.waits and self.context.replica_index.workers > 1:
            raise UsageError(
                f"{self.context.strategy.synchrony}: parameters joined or were frozen while others "
                "train on; do so before distribute, or train with bsp or local(h)"
            )
        self.drain()
        equalise(self)
        state = self.mode.state_dict()
        self.close()
        self.mode = self._plan()
        self.mode.load_state_dict(memory_of(self.parameters, state))

    def begin(self, step: int) -> None:
        """The step starts: send what may travel from here on."""
        self.wire.step = step
        self.replan()
        if self.replanning is not None:
            self.replanning.begin()
        self._begun = True
        if self.early is not None and self.early.compiled:
            self.early.drain()  # no hook inside a compiled graph will
        self._opened = [PendingFlow(flow, self.wire) for flow in self.mode.opening()]

    def arm(self, word: Callable[[], StepReport]) -> None:
        """The last backward of the step comes next; ``word`` gives mine on it, loss included."""
        self._settle_plan()
        if self.engine is not None and self.context.strategy.scheduling.overlaps:
            self.engine.arm(word)

    def _settle_plan(self) -> None:
        """Finish the step before; with nothing under way, messages may be others from here on."""
        self.drain()
        if self.replanning is not None:
            self.replanning.renew()

    def agree(self, word: StepReport, step: int) -> Callable[[], StepReports] | None:
        """After backward: agree on gradients and on everybody's word; None where nobody waits.

        With early updates nothing is waited for: the table is there when it is asked for.
        """
        if not self._begun:  # a loop without run.micro
            self.begin(step)
        if self.context.replica_index.workers == 1 and self.context.world.size == 1:
            return None
        if not (self.context.strategy.synchrony.waits and self.mode.due()):
            return None
        unused = self._send(word)
        asked: list[PendingReports] = []
        size = self.context.world.size
        copies = size // self.context.data_shard.count  # tensor and pipe ranks see the same samples
        word = word._replace(unused=len(unused))

        def say() -> None:
            asked.append(gather_reports(word, size=size, copies=copies))

        if self.engine is None:
            say()
            return asked[0].wait
        if not self.engine.rides:
            self.engine.line.submit(say)  # behind the gradients, in one order on every rank
        if self.replanning is not None:
            self.replanning.ask()
        if self.early is not None:
            self._defer(self.early, unused)
            return partial(_late, self.engine, asked)
        start = time.perf_counter()
        self.engine.settle()
        table = self.engine.table() if self.engine.rides else asked[0].wait()
        self.context.recorder.add("wait", "agree", start, time.perf_counter() - start, 0, step)
        agree_rows(self.sparse.values(), self.wire)
        if table.unused:
            self._drop_absent(set(unused))
        return lambda: table

    def _defer(self, early: EarlyUpdates, unused: tuple[str, ...]) -> None:
        """Leave updates to the next forward; those of looked-up rows do not wait for it."""
        names, missing = list(self.parameters), [n for n in unused if n in self.parameters]
        asked: list[UnusedParameters] = []

        def ask() -> None:
            asked.append(find_unused(set(missing), names, self.context.group))

        engine = early.engine
        engine.line.submit(ask)
        early.defer(missing, partial(_late, engine, asked))
        if self.sparse:
            engine.line.join()
            agree_rows(self.sparse.values(), self.wire)
            self.optimizer.step()
            for p in self.sparse.values():
                p.grad = None

    def _send(self, word: StepReport) -> tuple[str, ...]:
        """Put the rest of the gradients on the wire; return whose never came."""
        self._settle_plan()  # a loop without run.micro, or an empty share, came without a backward
        if self.engine is not None:
            rest = self.engine.send_rest(word)
            return rest + tuple(n for n, p in self.sparse.items() if p.grad is None)
        if self.mode.gradients is not None and self.context.replica_index.workers > 1:
            self.source.collect(self.mode.gradients)
            for index in range(len(self.mode.gradients.tasks)):
                drive(self.mode.gradients.flow(index), lambda ask: self.wire.ask(ask).wait())
            self.source.deliver(self.mode.gradients)
        return ()

    def _drop_absent(self, unused: set[str]) -> None:
        """A parameter without a gradient anywhere keeps none: its momentum must not move it."""
        everything = {**self.parameters, **self.sparse}
        for name in find_unused(unused, list(everything), self.context.group).wait():
            everything[name].grad = None

    def scale(self, factor: float) -> None:
        """Multiply the gradient."""
        for p in self._graded:
            if p.grad is not None:
                p.grad.mul_(factor)

    def forgo(self) -> None:
        """The step is skipped: nobody may use its gradients, nor remember them."""
        self.clear()
        if self.mode.gradients is not None:
            self.mode.gradients.revert()

    def update(self, apply: Callable[[], Any]) -> float:
        """End the step: update, and agree where that is due; seconds spent waiting for others."""
        start = time.perf_counter()
        for suspended in self._opened:
            suspended.finish()
        waits = [time.perf_counter() - start if self._opened else 0.0]
        self._opened, self._begun = [], False

        def answer(ask: Ask) -> Any:
            asked = time.perf_counter()
            told = self.wire.ask(ask).wait()
            waits.append(time.perf_counter() - asked)
            return told

        if self.early is None:
            with still(self):
                drive(self.mode.closing(apply), answer)
            self.clear()
        else:
            self.early.learn()
        return sum(waits)

    def clear(self) -> None:
        """Forget gradients; the next backward writes new ones into the same places."""
        for p in self._graded:
            p.grad = None
        self.factors.clear()

    def drain(self) -> None:
        """Finish what is pending, so that parameters may be read."""
        if self.early is not None:
            self.early.drain()
            self.early.engine.line.join()  # others' collectives come behind all that it issues

    def agreed(self) -> AbstractContextManager[nn.Module]:
        """Inside, the model is what all agree on: parameters where replicas differ, buffers too."""
        return agreed(self)

    def leave(self) -> None:
        """The run is over: keep serving peers until they are done, then close."""
        self.close()
        if self.served is not None:
            await_all(self.served, self.context)
            take_over(self.served, self.source, self.optimizer)
            self.served, self._settled = None, True
        self.wire.leave()

    def close(self) -> None:
        """Take hooks off and end threads."""
        if self.early is not None:
            self.early.close()
            self.early = None
        self.factors.close()
        if self.engine is not None:
            self.engine.close()
            self.engine = self.replanning = None


def _late(engine: Engine, asked: list[Any]) -> Any:
    engine.line.join()
    return asked[0].wait()
