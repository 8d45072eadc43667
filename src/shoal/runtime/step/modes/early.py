"""Update each layer just before its next forward, as soon as its own gradients are averaged.

After backward nothing is waited for:

1. ``agree`` sends the rest of the gradients and keeps this step's learning rates;
2. before a module's next forward, the buckets of its own parameters are waited for, and the
   optimizer steps on these parameters and on those that arrived in the same buckets;
3. the other parameters are updated before the next backward, or before the model or the optimizer
   is read (``drain``).

The first step shows which modules are called. Parameters that other modules use directly (the
output projection of ``nn.MultiheadAttention``) are updated before the nearest enclosing module that
is called. Under a plan that is not early, the first module waits for everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from shoal.runtime.loss import plain
from shoal.runtime.step.hooks import average_rows
from shoal.runtime.step.modes.mode import Apply, ModeSetup
from shoal.runtime.step.modes.overlapped import OverlappedGradients
from shoal.runtime.step.stats import PendingReports, StepReport, find_unused


class EarlyGradients(OverlappedGradients):
    """Overlaps the exchange with backward and with the next forward.

    The optimizer steps several times per round, each time on the parameters that have a gradient;
    optimizers skip the others.
    """

    defers: ClassVar[bool] = True

    def __init__(self, setup: ModeSetup) -> None:
        super().__init__(setup)
        model = setup.model_part.model
        self._waiting: set[str] = set()  # parameters whose update is still to come
        self._unused: set[str] = set()  # without a gradient on this worker
        self._unused_everywhere: Callable[[], set[str]] = set
        self._groups: list[dict[str, Any]] = []  # hyper-parameters of the deferred step
        self._called: set[str] = set()
        self._learnt = False
        self._outside: tuple[str, ...] = ()  # parameters of no module that is called
        names = {id(p): name for name, p in self.parameters.items()}
        self._own: dict[str, list[str]] = {}
        self._handles = [
            model.register_state_dict_pre_hook(lambda *_: self._finish_all()),  # type: ignore[no-untyped-call]
            self.optimizer.register_state_dict_pre_hook(lambda *_: self._finish_all()),
        ]
        self.compiled = _is_compiled(model)
        for name, module in model.named_modules():
            own = [names[id(p)] for p in module.parameters(recurse=False) if id(p) in names]
            self._own[plain(name)] = own
            if not self.compiled or module is model:
                hook = partial(self._before_forward, plain(name))
                self._handles.append(module.register_forward_pre_hook(hook))

    def begin(self, step: int) -> None:
        """Start to measure the step; a compiled model has no hooks, so finish its updates."""
        super().begin(step)
        if self.compiled:
            self._finish_all()

    def agree(self, report: StepReport) -> PendingReports:
        """Send the rest, and leave the updates to the next forward."""
        missing, pending = self._send(report)
        names = list(self.parameters)
        self._unused = missing & set(names)
        unused, group = set(self._unused), self.context.group
        self._unused_everywhere = self.engine.queue.call(lambda: find_unused(unused, names, group))
        self._waiting = set(names)
        for p in self.parameters.values():
            p.grad = None
        self._groups = _hyper_parameters(self.optimizer)
        setattr(self.optimizer, "_opt_called", True)  # noqa: B010  torch's schedulers check it
        if self.sparse:  # rows do not wait for the next forward
            self.engine.queue.join()
            average_rows(self.sparse.values(), self.wire)
            self.optimizer.step()
            for p in self.sparse.values():
                p.grad = None
        return pending

    def _renew_plan(self) -> None:
        """Finish the step before, so that no message is under way."""
        self.drain()
        super()._renew_plan()

    def finish(self, apply: Apply) -> float:
        """Note after the first step which modules were called; the update comes later."""
        if not (self._learnt or self.compiled) and self._called:
            self._learnt = True
            for name in [name for name in self._own if name not in self._called]:
                own = self._own.pop(name)
                enclosing = _nearest(name, self._called)
                if enclosing is not None:
                    self._own[enclosing] += own
                else:
                    self._outside += tuple(own)
        return 0.0

    def drain(self) -> None:
        """Do all updates that are still to come, and everything queued behind them."""
        self._finish_all()
        self.engine.queue.join()  # collectives of other groups must come after what it issues

    def close(self) -> None:
        """Remove the hooks and end the communication thread."""
        for handle in self._handles:
            handle.remove()
        super().close()

    def _before_forward(self, name: str, module: nn.Module, args: object) -> None:
        if not self._learnt:
            self._called.add(name)
        if not self._waiting:
            return
        early = self.engine.early and self._learnt and name in self._own
        if early and module.training:
            self._finish((*self._outside, *self._own[name]))
        else:
            self._finish_all()  # in evaluation, modules may read each other's parameters directly

    def _finish_all(self) -> None:
        self._finish(tuple(self.parameters))

    def _finish(self, names: tuple[str, ...]) -> None:
        """Wait for the buckets of these parameters, and update them."""
        names = tuple(name for name in dict.fromkeys(names) if name in self._waiting)
        if not names:
            return
        averaged = self.engine.settle_some(names) & self._waiting - self._unused
        names = tuple(dict.fromkeys((*names, *averaged)))  # with those in the same buckets
        views = self.exchange.flat.views
        with self._as_at_agree():
            for name in names:
                view = views[name].view
                used = name not in self._unused or bool(view.any())
                if used or name not in self._unused_everywhere():
                    self.parameters[name].grad = view
            with torch.enable_grad():
                self.optimizer.step()
        self._waiting.difference_update(names)
        if not self._waiting:
            self.engine.reset()
            self.exchange.end_round()

    @contextmanager
    def _as_at_agree(self) -> Iterator[None]:
        """Inside, learning rates are those of the deferred step, and newer gradients are hidden."""
        groups = self.optimizer.param_groups
        now = _hyper_parameters(self.optimizer)
        newer = [(p, p.grad) for group in groups for p in group["params"]]
        for p, _ in newer:
            p.grad = None
        # Groups added since then come last: their parameters have no gradient of that step.
        for group, then in zip(groups, self._groups, strict=False):
            group.update(then)
        try:
            yield
        finally:
            for group, today in zip(groups, now, strict=True):
                group.update(today)
            for p, grad in newer:
                p.grad = grad


def _hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def _is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile wraps it: hooks inside would become part of the graph."""
    calls = (getattr(m, "_compiled_call_impl", None) for m in model.modules())
    return hasattr(model, "_orig_mod") or any(call is not None for call in calls)


def _nearest(name: str, called: set[str]) -> str | None:
    """Return the nearest enclosing module among those called."""
    while name:
        name = name.rpartition(".")[0]
        if name in called:
            return name
    return None
