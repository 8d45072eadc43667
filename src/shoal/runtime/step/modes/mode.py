"""A mode decides what a worker exchanges with the others during a step, and when.

A mode owns its exchange. Its methods are called in the order of a step:

1. ``begin`` starts the step, and the flows that run during forward and backward.
2. ``arm`` is called before the last backward, which may then send gradients as they are computed.
3. ``agree`` is called after backward. It averages the gradients, and publishes the step report.
4. ``finish`` takes the optimizer's step, and exchanges parameters or changes if the strategy does.

The exchanges are written as flows (``opening``, ``averaging``, ``closing``). A process of a run
drives the flows over its wire. The lockstep trainer of the tests drives the flows of all workers in
one process.
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
"""A function that takes one optimizer step with the current gradients."""
State: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class ModeSetup:
    """The arguments from which a mode is built.

    Args:
        model_part: the model, or the part of it, that this rank trains.
        optimizer: the user's optimizer.
        wire: the wire that answers the asks of flows.
        context: the context of the run.
        timed: whether compressors may choose by the measured seconds of exchanges.
    """

    model_part: ModelPart
    optimizer: torch.optim.Optimizer
    wire: TracedWire
    context: RunContext
    timed: bool = True

    @property
    def carrier(self) -> Wire:
        """The wire without the timeline recording."""
        return self.wire.inner

    @property
    def index(self) -> ReplicaIndex:
        """The index of this worker, and the number of workers."""
        return self.context.replica_index

    @cached_property
    def strategy(self) -> Strategy:
        """The run's strategy, or the default if it has servers and there is only one worker."""
        served = self.context.strategy.coordination.via == "server"
        return Strategy() if served and self.index.workers == 1 else self.context.strategy

    @cached_property
    def sparse(self) -> dict[str, Tensor]:
        """The parameters whose gradients are exchanged as sparse rows, by name."""
        ids = sparse_parameters(self.model_part.model, self.context.strategy)
        return {n: p for n, p in self.model_part.trainable().items() if id(p) in ids}

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """The trainable parameters that are not in ``sparse``, in the order of the model."""
        return {n: p for n, p in self.model_part.trainable().items() if n not in self.sparse}

    @cached_property
    def reports(self) -> OwnReport:
        """The object that publishes step reports, if they are not sent with the gradients."""
        world = self.context.world
        return OwnReport() if world.size == 1 else GatheredReports(world.size, self.context.copies)

    def exchange(self, *, tail: int = 0) -> Exchange:
        """Return an exchange with buffers for all parameters, and a tail of ``tail`` numbers."""
        s, workers = self.strategy, self.index.workers
        allocate = allocator(s, self.context.group, workers=workers)
        flat = FlatBuffers(self.parameters, tail=tail, allocate=allocate)
        exchange = Exchange(flat, s.scheduling, s.compression)
        if s.compression.timed and self.timed:
            exchange.stopwatch = Stopwatch(logs=self.context.world.is_main)
        return exchange


class Mode:
    """The base class of all modes, which drives the flows of a mode over its wire."""

    agrees: ClassVar[bool] = False  # whether all workers hold the same model after every step
    defers: ClassVar[bool] = False  # whether updates happen in the next forward, or later

    exchange: Exchange  # set by every mode except `PairsMode`

    def __init__(self, setup: ModeSetup) -> None:
        self.wire, self.reports, self.parameters = setup.wire, setup.reports, setup.parameters
        self.synchrony = setup.strategy.synchrony
        self.steps = 0  # counted by modes that do not exchange in every step
        self._opened: list[PendingFlow] = []

    @property
    def equal_now(self) -> bool:
        """Whether all workers hold the same model now."""
        return self.agrees

    @property
    def shares_optimizer(self) -> bool:
        """Whether a checkpoint saves one optimizer state for all workers."""
        return self.equal_now

    # Flows, in the order of a step.

    def opening(self) -> list[Asks]:
        """Return the flows that run during forward and backward."""
        return []

    def averaging(self) -> Asks:
        """Return the flow that averages the gradients after backward. The default is empty."""
        yield from ()

    def closing(self, apply: Apply) -> Asks:
        """Return the flow that calls ``apply``, and does the exchange at the end of a step."""
        apply()
        yield from ()

    def due(self) -> bool:
        """Return whether workers wait for each other and this step ends a period."""
        return self.synchrony.waits and (self.steps + 1) % self.synchrony.period == 0

    # Methods that a replica calls, in the order of a step.

    def begin(self, step: int) -> None:
        """Start the flows that run during forward and backward."""
        self._opened = [PendingFlow(flow, self.wire) for flow in self.opening()]

    def arm(self, report: Callable[[], StepReport]) -> None:
        """Prepare for the last backward of the step. ``report`` returns the step report."""

    def agree(self, report: StepReport) -> PendingReports:
        """Average the gradients, publish the step report, and return the pending reports."""
        drive(self.averaging(), lambda ask: self.wire.ask(ask).wait())
        return (self.reports if self.due() else OwnReport()).publish(report)

    def finish(self, apply: Apply) -> float:
        """Finish all flows and call ``apply``. Return the seconds of waiting for answers."""
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
        """Undo what the current step changed in the mode's state, because of a NaN or inf."""

    def clear(self) -> None:
        """Drop what the mode stores of this step besides the gradients."""

    def drain(self) -> None:
        """Finish deferred updates, so that the parameters can be read."""

    def close(self) -> None:
        """Remove all hooks and end all threads of the mode."""

    def leave(self) -> None:
        """End the run for this worker."""

    def lock(self) -> AbstractContextManager[object]:
        """Return a context in which peers cannot change this worker's parameters."""
        return nullcontext()

    def pull(self) -> Set[int]:
        """Copy the servers' model into this model. Return ``data_ptr()`` of changed tensors."""
        return frozenset()

    def optimizer_state(self, own: State) -> State:
        """Return the optimizer state to save, which is ``own`` or the servers' state."""
        return own

    def load_remote(self, state: State) -> State:
        """Send model and optimizer state to any servers. Return the state to load here."""
        return state

    def state_dict(self) -> State:
        """Return the state to save. The default is the state of the exchange."""
        return self.exchange.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` returned. An empty dict resets the state."""
        self.exchange.load_state_dict(state)
