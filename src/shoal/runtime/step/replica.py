"""One model, its optimizer, its mode and its wire."""

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
    """A model or a part of one, the user's optimizer, and the mode that exchanges them."""

    def __init__(
        self, source: ModelPart, optimizer: torch.optim.Optimizer, context: RunContext, wire: Wire
    ) -> None:
        self.source, self.model, self.optimizer = source, source.model, optimizer
        self.needs_closure = needs_closure(optimizer)
        self.context = context
        self.wire = TracedWire(wire, context.recorder)
        self._begun = False
        self.mode: Mode = self._plan()

    def _plan(self) -> Mode:
        """Build the mode for what is trainable now."""
        self._signature = self._trainable_flags()
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        parameters = {id(p): p for p in (*stepped, *self.model.parameters())}
        self._with_gradients = list(parameters.values())
        setup = ModeSetup(self.source, self.optimizer, self.wire, self.context)
        self._planned = {**setup.parameters, **setup.sparse}
        hooked = isinstance(self.source, ReplicatedModel) and setup.index.workers > 1
        return choose(setup.strategy, overlaps=hooked)(setup)

    def _trainable_flags(self) -> list[bool]:
        """Return what is trainable: one flag per parameter of the optimizer."""
        return [p.requires_grad for group in self.optimizer.param_groups for p in group["params"]]

    # One step.

    def begin(self, step: int) -> None:
        """Start a step."""
        self.wire.step = step
        if self._trainable_flags() != self._signature:
            self._replan()
        self._begun = True
        self.mode.begin(step)

    def agree(self, report: StepReport, step: int) -> PendingReports:
        """Average the gradients and publish the step report, after backward."""
        if not self._begun:  # a loop without run.micro
            self.begin(step)
        return self.mode.agree(report)

    def finish(self, apply: Apply) -> float:
        """Update and end the step; return the seconds spent waiting for other workers."""
        self._begun = False
        waited = self.mode.finish(apply)
        if not self.mode.defers:
            self.clear()
        return waited

    def skip(self) -> None:
        """Forget the gradients of this step, because they contain a NaN."""
        self.clear()
        self.mode.skip()

    def clear(self) -> None:
        """Drop the gradients; the next backward writes new ones into the same memory."""
        for p in self._with_gradients:
            p.grad = None
        self.mode.clear()

    # When parameters are added, frozen or unfrozen.

    def _replan(self) -> None:
        """Build the mode anew; it keeps its state of the parameters that stay."""
        waits, workers = self.context.strategy.synchrony.waits, self.context.replica_index.workers
        if not waits and workers > 1:
            raise UsageError(
                f"{self.context.strategy.synchrony}: parameters were added or frozen while other "
                "workers train; do so before distribute, or train with bsp or local(h)"
            )
        self.mode.drain()
        if workers > 1:
            self._make_equal()
        state = self.mode.state_dict()
        self.mode.close()
        self.mode = self._plan()
        self.mode.load_state_dict(_state_of(self.source.trainable(), state))

    @torch.no_grad()
    def _make_equal(self) -> None:
        """Give all workers the same model: the mean, and rank 0's values of new parameters."""
        if not self.mode.agrees:
            for tensor in self._planned.values():  # also those that were frozen just now
                self._average(tensor)
        for name, tensor in self.source.trainable().items():
            if name not in self._planned:
                first = real(tensor.detach()).contiguous()
                dist.broadcast(first, group=self.context.group, group_src=0)
                real(tensor.detach()).copy_(first)

    def _average(self, tensor: Tensor) -> None:
        """Replace a tensor by the mean over all workers."""
        total = real(tensor.detach()).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.context.group)
        real(tensor.detach()).copy_(total / self.context.replica_index.workers)

    # Between steps.

    @contextmanager
    @torch.no_grad()
    def agreed(self) -> Iterator[nn.Module]:
        """Inside, the model is the one that all workers agree on, buffers included.

        That is the mean where replicas differ, or the servers' model. BatchNorm's running
        statistics are each worker's own during training; inside they are the mean.
        """
        self.mode.drain()
        workers = self.context.replica_index.workers
        tensors = [b for b in self.model.buffers() if b.is_floating_point()]
        if not self.mode.equal_now:
            tensors += list(self.source.trainable().values())
        if workers == 1:
            tensors = []
        elif not self.context.strategy.synchrony.waits:
            dist.barrier()  # from here on no worker pushes, nor averages with a peer
        with self.mode.lock():
            before = [t.detach().clone() for t in tensors]
            pulled = self.mode.pull() if workers > 1 else frozenset()
            for tensor in tensors:
                if tensor.data_ptr() not in pulled:  # all pulled the same: a mean would round
                    self._average(tensor)
            try:
                yield self.model
            finally:
                for tensor, old in zip(tensors, before, strict=True):
                    tensor.copy_(old)

    def leave(self) -> None:
        """End the run for this worker: serve peers until they are done, then close."""
        self.mode.close()
        self.mode.leave()
        self.wire.leave()


def _state_of(names: Mapping[str, Tensor], state: Any) -> Any:
    """Return a mode's state of these parameters, without anchors: all replicas are equal now."""
    if not isinstance(state, Mapping):
        return state
    parts = {k: _state_of(names, v) for k, v in state.items() if k not in ("anchor", "states")}
    if "states" in state:
        states = state["states"].items()
        parts["states"] = {k: v for k, v in states if k.partition("[")[0] in names}
    return parts
