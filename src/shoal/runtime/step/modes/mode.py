"""A mode decides what a worker exchanges with the others during a step, and when.

A mode owns its exchange. Its methods are called in the order of a step:

1. ``begin``   the step starts: send what may travel during forward and backward;
2. ``arm``     the last backward of the step comes next: gradients may leave as they arrive;
3. ``agree``   backward is over: average the gradients, publish the step report;
4. ``finish``  take the optimizer's step, exchange parameters or changes where that is due.

The exchanges are written as flows (``opening``, ``averaging``, ``closing``), so that the same code
serves the processes of a run, which drive the flows over their wire, and the lockstep trainer of
the tests, which drives the flows of all workers in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from shoal.axes.compression.kit.stopwatch import Stopwatch
from shoal.flow import Ask, Asks, drive
from shoal.runtime.context import ReplicaIndex, RunContext
from shoal.runtime.step.buffers import FlatBuffers, allocator
from shoal.runtime.step.comm_queue import PendingFlow
from shoal.runtime.step.exchange import Exchange
from shoal.runtime.step.hooks import sparse_parameters
from shoal.runtime.step.model import ModelPart
from shoal.runtime.step.stats import GatheredReports, OwnReport, PendingReports, StepReport
from shoal.strategy import Strategy
from shoal.wire.wire import TracedWire, Wire

Apply: TypeAlias = Callable[[], object]
"""Takes one optimizer step with the gradients in place."""
State: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class ModeSetup:
    """What a mode is built from.

    Args:
        model_part: the model that this rank trains.
        optimizer: the user's optimizer.
        wire: answers the asks of flows.
        context: the run.
        timed: whether exchanges take time, which some compressors measure.
    """

    model_part: ModelPart
    optimizer: torch.optim.Optimizer
    wire: TracedWire
    context: RunContext
    timed: bool = True

    @property
    def carrier(self) -> Wire:
        """The wire itself, without the tracing."""
        return self.wire.inner

    @property
    def index(self) -> ReplicaIndex:
        """The number of this worker, and the number of workers."""
        return self.context.replica_index

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy. One worker needs no server: its own optimizer steps."""
        served = self.context.strategy.coordination.via == "server"
        return Strategy() if served and self.index.workers == 1 else self.context.strategy

    @cached_property
    def sparse(self) -> dict[str, Tensor]:
        """The parameters whose gradients are exchanged as sparse rows."""
        ids = sparse_parameters(self.model_part.model, self.context.strategy)
        return {n: p for n, p in self.model_part.trainable().items() if id(p) in ids}

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """The other trainable parameters, in forward order."""
        return {n: p for n, p in self.model_part.trainable().items() if n not in self.sparse}

    @cached_property
    def reports(self) -> OwnReport:
        """How step reports reach all ranks, unless they travel with the gradients."""
        world = self.context.world
        return OwnReport() if world.size == 1 else GatheredReports(world.size, self.context.copies)

    def exchange(self, *, tail: int = 0) -> Exchange:
        """Return an exchange of tensors shaped as the parameters, with a tail of numbers."""
        s, workers = self.strategy, self.index.workers
        allocate = allocator(s, self.context.group, workers=workers)
        flat = FlatBuffers(self.parameters, tail=tail, allocate=allocate)
        exchange = Exchange(flat, s.scheduling, s.compression)
        if s.compression.timed and self.timed:
            exchange.stopwatch = Stopwatch(logs=self.context.world.is_main)
        return exchange


class Mode:
    """The base of all modes: it drives a mode's flows over its wire.

    Args:
        setup: what the mode is built from.
    """

    agrees: ClassVar[bool] = False  # whether all workers hold the same model after every step
    defers: ClassVar[bool] = False  # whether updates happen during the next forward

    exchange: Exchange  # every mode but `PairsMode` makes one

    def __init__(self, setup: ModeSetup) -> None:
        self.wire, self.reports, self.parameters = setup.wire, setup.reports, setup.parameters
        self.synchrony = setup.strategy.synchrony
        self.steps = 0  # counted by modes that do not exchange in every step
        self._opened: list[PendingFlow] = []

    @property
    def equal_now(self) -> bool:
        """Whether all workers hold the same model at this moment."""
        return self.agrees

    @property
    def shares_optimizer(self) -> bool:
        """Whether one optimizer state serves all workers."""
        return self.equal_now

    # Flows, in the order of a step.

    def opening(self) -> list[Asks]:
        """Return the flows that may run from the start of the step on."""
        return []

    def averaging(self) -> Asks:
        """Average the gradients after backward, in modes that exchange gradients."""
        yield from ()

    def closing(self, apply: Apply) -> Asks:
        """Take the optimizer's step, and exchange what is due after it."""
        apply()
        yield from ()

    def due(self) -> bool:
        """Return whether all workers exchange in the current step: the last one of a period."""
        return self.synchrony.waits and (self.steps + 1) % self.synchrony.period == 0

    # Methods that a replica calls, in the order of a step.

    def begin(self, step: int) -> None:
        """Start the flows that may run from the start of the step on."""
        self._opened = [PendingFlow(flow, self.wire) for flow in self.opening()]

    def arm(self, report: Callable[[], StepReport]) -> None:
        """Prepare for the last backward; ``report`` returns the step report with its loss."""

    def agree(self, report: StepReport) -> PendingReports:
        """Average the gradients, and publish the step report where all workers exchange."""
        drive(self.averaging(), lambda ask: self.wire.ask(ask).wait())
        return (self.reports if self.due() else OwnReport()).publish(report)

    def finish(self, apply: Apply) -> float:
        """End the step; return the seconds spent waiting for other workers."""
        waited = 0.0
        start = time.perf_counter()
        for flow in self._opened:
            flow.finish()
        if self._opened:
            waited = time.perf_counter() - start
        self._opened = []

        def answer(ask: Ask) -> Any:
            nonlocal waited
            asked = time.perf_counter()
            result = self.wire.ask(ask).wait()
            waited += time.perf_counter() - asked
            return result

        drive(self.closing(apply), answer)
        return waited

    # Between steps.

    def skip(self) -> None:
        """Forget what the current step added to the state, because it contains a NaN."""

    def clear(self) -> None:
        """Drop what the mode keeps in addition to the gradients."""

    def drain(self) -> None:
        """Finish pending updates, so that the parameters may be read."""

    def close(self) -> None:
        """Remove hooks and end threads."""

    def leave(self) -> None:
        """End the run for this worker; peers may still need it until then."""

    def lock(self) -> AbstractContextManager[object]:
        """Keep peers from changing this worker's parameters; most modes have no such peers."""
        return nullcontext()

    def pull(self) -> Set[int]:
        """Copy the servers' model into this one; return the addresses that were written."""
        return frozenset()

    def optimizer_state(self, own: State) -> State:
        """Return the optimizer's state to save: this worker's own, or the servers'."""
        return own

    def load_remote(self, state: State) -> State:
        """Give model and optimizer state to the servers; return the state to load here."""
        return state

    def state_dict(self) -> State:
        """Return everything remembered between steps; by default, the compressor's state."""
        return self.exchange.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; an empty state starts from the model as it is."""
        self.exchange.load_state_dict(state)
