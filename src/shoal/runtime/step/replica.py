"""A model (or this rank's part of it) with its optimizer, its mode and its wire."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.runtime.context import RunContext
from shoal.runtime.step.buffers import real
from shoal.runtime.step.model import ModelPart, ReplicatedModel
from shoal.runtime.step.modes import Apply, Mode, ModeSetup, choose
from shoal.runtime.step.stats import PendingReports, StepReport
from shoal.runtime.validate import needs_closure
from shoal.wire.wire import TracedWire, Wire


class Replica:
    """Trains a model through a mode. If parameters are added or (un)frozen, builds a new mode."""

    def __init__(
        self,
        model_part: ModelPart,
        optimizer: torch.optim.Optimizer,
        context: RunContext,
        wire: Wire,
    ) -> None:
        self.model_part, self.model, self.optimizer = model_part, model_part.model, optimizer
        self.needs_closure = needs_closure(optimizer)
        self.context = context
        self.wire = TracedWire(wire, context.recorder)
        self._begun = False
        self.mode: Mode = self._plan()

    def _plan(self) -> Mode:
        """Return a mode for the parameters that require gradients now."""
        self._signature = self._trainable_flags()
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        parameters = {id(p): p for p in (*stepped, *self.model.parameters())}
        self._with_gradients = list(parameters.values())
        setup = ModeSetup(self.model_part, self.optimizer, self.wire, self.context)
        self._planned = {**setup.parameters, **setup.sparse}
        hooked = isinstance(self.model_part, ReplicatedModel) and setup.index.workers > 1
        return choose(setup.strategy, overlaps=hooked)(setup)

    def _trainable_flags(self) -> list[bool]:
        """Return ``requires_grad`` of each parameter of the optimizer."""
        return [p.requires_grad for group in self.optimizer.param_groups for p in group["params"]]

    # One step.

    def begin(self, step: int) -> None:
        """Start a step. Rebuild the mode if parameters were added, frozen or unfrozen."""
        self.wire.step = step
        if self._trainable_flags() != self._signature:
            self._replan()
        self._begun = True
        self.mode.begin(step)

    def agree(self, report: StepReport, step: int) -> PendingReports:
        """After backward, let the mode average the gradients and publish the step report."""
        if not self._begun:  # the loop does not use run.micro
            self.begin(step)
        return self.mode.agree(report)

    def finish(self, apply: Apply) -> float:
        """Let the mode call ``apply`` and end the step. Return the seconds of waiting."""
        self._begun = False
        waited = self.mode.finish(apply)
        if not self.mode.defers:
            self.clear()
        return waited

    def skip(self) -> None:
        """Drop the gradients of this step, because the loss or a gradient is NaN or inf."""
        self.clear()
        self.mode.skip()

    def clear(self) -> None:
        """Set all gradients to None, and drop other data of this step in the mode."""
        for p in self._with_gradients:
            p.grad = None
        self.mode.clear()

    # Used when parameters were added, frozen or unfrozen.

    def _replan(self) -> None:
        """Build a new mode, and load the old mode's state of parameters that still train."""
        waits, workers = self.context.strategy.synchrony.waits, self.context.replica_index.workers
        if not waits and workers > 1:
            raise UsageError(
                f"{self.context.strategy.synchrony}: parameters cannot be added or frozen while "
                "other workers train; instead: do so before distribute, or use bsp or local(h)"
            )
        self.mode.drain()
        if workers > 1:
            self._make_equal()
        state = self.mode.state_dict()
        self.mode.close()
        self.mode = self._plan()
        self.mode.load_state_dict(_state_of(self.model_part.trainable(), state))

    @torch.no_grad()
    def _make_equal(self) -> None:
        """Average the model if workers may have different ones, and broadcast new parameters."""
        if not self.mode.agrees:
            for tensor in self._planned.values():  # including parameters that were frozen just now
                self._average(tensor)
        for name, tensor in self.model_part.trainable().items():
            if name not in self._planned:
                first = real(tensor.detach()).contiguous()
                dist.broadcast(first, group=self.context.group, group_src=0)
                real(tensor.detach()).copy_(first)

    def _average(self, tensor: Tensor) -> None:
        """Replace a tensor by the mean over all workers, in place."""
        total = real(tensor.detach()).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.context.group)
        real(tensor.detach()).copy_(total / self.context.replica_index.workers)

    # Between steps.

    @contextmanager
    @torch.no_grad()
    def agreed(self) -> Iterator[nn.Module]:
        """Return a context in which all workers have the same model, called the agreed model.

        If models differ, the agreed model is their mean or the servers' model. Float buffers
        are averaged. All workers must enter together. At the end, each has its own values again.
        """
        self.mode.drain()
        workers = self.context.replica_index.workers
        tensors = [b for b in self.model.buffers() if b.is_floating_point()]
        if not self.mode.equal_now:
            tensors += list(self.model_part.trainable().values())
        if workers == 1:
            tensors = []
        elif not self.context.strategy.synchrony.waits:
            dist.barrier()  # after it, no worker pushes or averages with a peer
        with self.mode.lock():
            before = [t.detach().clone() for t in tensors]
            pulled = self.mode.pull() if workers > 1 else frozenset()
            for tensor in tensors:
                if tensor.data_ptr() not in pulled:  # pulled tensors are equal already
                    self._average(tensor)
            try:
                yield self.model
            finally:
                for tensor, old in zip(tensors, before, strict=True):
                    tensor.copy_(old)

    def leave(self) -> None:
        """End the run for this worker. The wire answers peers until all workers are done."""
        self.mode.close()
        self.mode.leave()
        self.wire.leave()


def _state_of(names: Mapping[str, Tensor], state: Any) -> Any:
    """Return a mode's state of these parameters, without anchors, which a new mode makes."""
    if not isinstance(state, Mapping):
        return state
    parts = {k: _state_of(names, v) for k, v in state.items() if k not in ("anchor", "states")}
    if "states" in state:
        states = state["states"].items()
        parts["states"] = {k: v for k, v in states if k.partition("[")[0] in names}
    return parts
