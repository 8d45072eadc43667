"""A layer's next forward starts as soon as its own gradients are agreed.

After backward nothing is waited for. Before a module's next forward, its own parameters' tasks are
settled and the optimizer takes its step for these, and for those that came in the same messages.
Whatever no module's forward asked for is done before the next backward at the latest, or before the
model or the optimizer is read. Under a plan that is not early, the first module asks for all.

Which modules are called is learnt in the first step: parameters that others use in their place (the
output projection of ``nn.MultiheadAttention``) are updated before the nearest module around them
that is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.runtime.loss import modules
from shoal.runtime.step.engine import Engine

Nowhere = Callable[[], set[str]]


class EarlyUpdates:
    """Updates that run module by module, ahead of its next forward.

    Args:
        model: whose modules ask.
        optimizer: the user's; it skips parameters without a gradient, so it can step some.
        engine: where the gradients are agreed.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
        self.optimizer = optimizer
        self.engine = engine
        self._left: set[str] = set()
        self._unused: set[str] = set()
        self._nowhere: Nowhere = set
        self._groups: list[dict[str, Any]] = []
        self._called: set[str] = set()
        self._learnt = False
        self._loose: tuple[str, ...] = ()
        known = {id(p): name for name, p in engine.parameters.items()}
        self._own: dict[str, list[str]] = {}
        self._handles = [
            model.register_state_dict_pre_hook(lambda *_: self.drain()),  # type: ignore[no-untyped-call]
            optimizer.register_state_dict_pre_hook(lambda *_: self.drain()),
        ]
        self.compiled = _compiled(model)
        for name, module in modules(model).items():
            own = [known[id(p)] for p in module.parameters(recurse=False) if id(p) in known]
            self._own[name] = own
            if not self.compiled or module is model:
                self._handles.append(module.register_forward_pre_hook(partial(self._before, name)))

    @property
    def pending(self) -> bool:
        """Whether a step's updates are still to come."""
        return bool(self._left)

    def defer(self, unused: Iterable[str], nowhere: Nowhere) -> None:
        """The step's gradients are on their way: update later, with today's learning rates.

        Args:
            unused: whose gradient did not come here.
            nowhere: tells whose gradient came to no worker; may wait.
        """
        self._left = set(self.engine.parameters)
        self._unused, self._nowhere = set(unused), nowhere
        for p in self.engine.parameters.values():
            p.grad = None
        keep = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        self._groups = keep
        setattr(self.optimizer, "_opt_called", True)  # noqa: B010  torch's schedulers ask for it

    def drain(self) -> None:
        """Do all updates that are still to come."""
        self._finish(tuple(self.engine.parameters))

    def learn(self) -> None:
        """A whole forward was seen: from now on modules may start early."""
        if self._learnt or self.compiled or not self._called:
            return
        self._learnt = True
        for name in [name for name in self._own if name not in self._called]:
            around = _nearest(name, self._called)
            own = self._own.pop(name)
            if around is not None:
                self._own[around] += own
            else:
                self._loose += tuple(own)

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _before(self, name: str, module: nn.Module, args: object) -> None:
        if not self._learnt:
            self._called.add(name)
        if not self._left:
            return
        early = self.engine.early and self._learnt and name in self._own
        if not (early and module.training):
            self.drain()  # in evaluation modules may read each other's parameters past forward
        else:
            self._finish((*self._loose, *self._own[name]))

    def _finish(self, names: tuple[str, ...]) -> None:
        names = tuple(name for name in dict.fromkeys(names) if name in self._left)
        if not names:
            return
        came = self.engine.settle_some(names) & self._left - self._unused  # in the same messages
        names = tuple(dict.fromkeys((*names, *came)))
        places, parameters = self.engine.agreement.flats.places, self.engine.parameters
        with self._as_it_was():
            for name in names:
                view = places[name].view
                sent = name not in self._unused or bool(view.any())
                if sent or name not in self._nowhere():
                    parameters[name].grad = view
            with torch.enable_grad():
                self.optimizer.step()
        self._left.difference_update(names)
        if not self._left:
            self.engine.forget()
            self.engine.agreement.end_round()

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """The step that is late: its learning rates, and none of the gradients come since."""
        groups = self.optimizer.param_groups
        now = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        since = [(p, p.grad) for group in groups for p in group["params"]]
        for p, _ in since:
            p.grad = None
        # groups that joined since come last: their parameters have no gradient of that step
        for group, then in zip(groups, self._groups, strict=False):
            group.update(then)
        try:
            yield
        finally:
            for group, today in zip(groups, now, strict=True):
                group.update(today)
            for p, grad in since:
                p.grad = grad


def _compiled(model: nn.Module) -> bool:
    """Whether torch.compile holds it: hooks inside would become part of the graph."""
    inside = (getattr(m, "_compiled_call_impl", None) for m in model.modules())
    return hasattr(model, "_orig_mod") or any(call is not None for call in inside)


def _nearest(name: str, called: set[str]) -> str | None:
    while name:
        name = name.rpartition(".")[0]
        if name in called:
            return name
    return None
