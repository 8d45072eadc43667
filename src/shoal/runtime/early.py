"""A layer's next forward starts as soon as its own gradients are agreed.

After backward nothing is waited for. Before a module's next forward, its own parameters' tasks are
settled and the optimizer takes its step for just these. Whatever no module's forward asked for is
done before the next backward at the latest.

Which modules are called is learnt in the first step: parameters that others use in their place (the
output projection of ``nn.MultiheadAttention``) are updated before the forward of the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.runtime.engine import Engine
from shoal.runtime.objective import modules


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
        self._groups: list[dict[str, Any]] = []
        self._called: set[str] = set()
        self._learnt = False
        known = {id(p): name for name, p in engine.parameters.items()}
        self._own: dict[str, tuple[str, ...]] = {}
        self._handles = [model.register_forward_pre_hook(self._before_all)]
        for name, module in modules(model).items():
            own = [known[id(p)] for p in module.parameters(recurse=False) if id(p) in known]
            if own:
                self._own[name] = tuple(own)
                hook = partial(self._before, name)
                self._handles.append(module.register_forward_pre_hook(hook))

    @property
    def pending(self) -> bool:
        """Whether a step's updates are still to come."""
        return bool(self._left)

    def defer(self, unused: Mapping[str, object] | set[str] | tuple[str, ...]) -> None:
        """The step's gradients are on their way: update later, with today's learning rates."""
        self._left = set(self.engine.parameters)
        self._unused = set(unused)
        for p in self.engine.parameters.values():
            p.grad = None
        keep = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        self._groups = keep

    def drain(self) -> None:
        """Do all updates that are still to come."""
        if self._left:
            self._finish(tuple(name for name in self.engine.parameters if name in self._left))

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _before_all(self, module: nn.Module, args: object) -> None:
        if not self._left:
            return None
        if not self._learnt:
            return self.drain()
        reached = {p for name in self._called for p in self._own[name]}
        rest = tuple(name for name in self.engine.parameters if name in self._left - reached)
        return self._finish(rest) if rest else None

    def _before(self, name: str, module: nn.Module, args: object) -> None:
        if module.training and not self._learnt:
            self._called.add(name)
        if self._left:
            mine = tuple(p for p in self._own[name] if p in self._left)
            if mine:
                self._finish(mine)

    def learn(self) -> None:
        """A whole forward was seen: from now on modules may start early."""
        self._learnt = True

    def _finish(self, names: tuple[str, ...]) -> None:
        self.engine.settle_some(names)
        places = self.engine.agreement.flats.places
        now = [dict(group) for group in self.optimizer.param_groups]
        for group, then in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.update(then)
        for name in names:
            view = places[name].view
            if name not in self._unused or bool(view.any()):
                self.engine.parameters[name].grad = view
        with torch.enable_grad():
            self.optimizer.step()
        for group, before in zip(self.optimizer.param_groups, now, strict=True):
            group.update({k: v for k, v in before.items() if k != "params"})
        for name in names:
            self.engine.parameters[name].grad = None
        self._left.difference_update(names)
        if not self._left:
            self.engine.forget()
            self.engine.agreement.round += 1
