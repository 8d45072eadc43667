"""Update each layer just before its next forward, as soon as its own gradients are averaged.

A step does not wait for messages after its backward:

1. ``agree`` sends the rest of the gradients and stores this step's hyper-parameters.
2. Before the next forward of a module, a hook waits for the buckets of the module's own parameters.
   Then the optimizer updates all parameters that these buckets complete.
3. All other parameters are updated before the last backward of the next step, or before the
   ``state_dict`` of the model or the optimizer is read.

The first step shows which modules are called. A parameter of a module that is not called (the
output projection of ``nn.MultiheadAttention``) is updated before the nearest enclosing module that
is called. In evaluation, or if the current plan is not ``early``, the first forward hook waits for
all buckets.
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
    """Averages gradients during backward and during the next forward.

    ``optimizer.step`` is called several times per step. Only the parameters to update have a
    gradient then, and optimizers skip parameters without one.
    """

    defers: ClassVar[bool] = True

    def __init__(self, setup: ModeSetup) -> None:
        super().__init__(setup)
        model = setup.model_part.model
        self._waiting: set[str] = set()  # parameters that are not updated yet
        self._unused: set[str] = set()  # parameters without a gradient on this worker
        self._unused_everywhere: Callable[[], set[str]] = set
        self._groups: list[dict[str, Any]] = []  # hyper-parameters of the deferred step
        self._called: set[str] = set()
        self._learnt = False
        self._outside: tuple[str, ...] = ()  # parameters that are in no called module
        names = {id(p): name for name, p in self.parameters.items()}
        self._own: dict[str, list[str]] = {}  # module -> parameters to update before it
        self._handles = [
            model.register_state_dict_pre_hook(lambda *_: self._finish_all()),  # type: ignore[no-untyped-call]
            self.optimizer.register_state_dict_pre_hook(lambda *_: self._finish_all()),
        ]
        self.compiled = _is_compiled(model)
        for name, module in model.named_modules():
            own = [names[id(p)] for p in module.parameters(recurse=False) if id(p) in names]
            self._own[plain(name)] = own
            if not self.compiled or module is model:  # hooks inside would be compiled, too
                hook = partial(self._before_forward, plain(name))
                self._handles.append(module.register_forward_pre_hook(hook))

    def begin(self, step: int) -> None:
        """Start a step. Finish all updates of a compiled model, whose submodules have no hooks."""
        super().begin(step)
        if self.compiled:
            self._finish_all()

    def agree(self, report: StepReport) -> PendingReports:
        """Send the remaining gradients. The next forward waits for them, and updates."""
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
        if self.sparse:  # sparse gradients are averaged and applied at once
            self.engine.queue.join()
            average_rows(self.sparse.values(), self.wire)
            self.optimizer.step()
            for p in self.sparse.values():
                p.grad = None
        return pending

    def _renew_plan(self) -> None:
        """Finish the previous step, so that no message is in transfer. Then renew the plan."""
        self.drain()
        super()._renew_plan()

    def finish(self, apply: Apply) -> float:
        """After the first step, assign parameters to called modules. Never call ``apply``."""
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
        """Do all remaining updates, and wait for all queued jobs."""
        self._finish_all()
        self.engine.queue.join()  # its jobs must come before collectives of other groups

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
            self._finish_all()  # in evaluation, a module may use another's parameters

    def _finish_all(self) -> None:
        self._finish(tuple(self.parameters))

    def _finish(self, names: tuple[str, ...]) -> None:
        """Wait for the buckets of these parameters, and update all parameters they complete."""
        names = tuple(name for name in dict.fromkeys(names) if name in self._waiting)
        if not names:
            return
        averaged = self.engine.settle_some(names) & self._waiting - self._unused
        names = tuple(dict.fromkeys((*names, *averaged)))  # add others of the same buckets
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
        """For a block, set the deferred step's hyper-parameters, and all gradients to None."""
        groups = self.optimizer.param_groups
        current = _hyper_parameters(self.optimizer)
        current_grads = [(p, p.grad) for group in groups for p in group["params"]]
        for p, _ in current_grads:
            p.grad = None
        # Groups that were added after the deferred step come last, and have no gradient of it.
        for group, deferred in zip(groups, self._groups, strict=False):
            group.update(deferred)
        try:
            yield
        finally:
            for group, values in zip(groups, current, strict=True):
                group.update(values)
            for p, grad in current_grads:
                p.grad = grad


def _hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def _is_compiled(model: nn.Module) -> bool:
    """Return whether the model or a submodule is compiled by torch.compile."""
    calls = (getattr(m, "_compiled_call_impl", None) for m in model.modules())
    return hasattr(model, "_orig_mod") or any(call is not None for call in calls)


def _nearest(name: str, called: set[str]) -> str | None:
    """Return the nearest enclosing module that is in ``called``, or None."""
    while name:
        name = name.rpartition(".")[0]
        if name in called:
            return name
    return None
