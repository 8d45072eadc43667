"""A whole model, or this rank's part of a model that is sharded over ranks.

Both classes have the same methods, so that modes need not distinguish them. ``trainable`` returns
the parameters. ``collect`` copies their gradients into an exchange, and ``deliver`` replaces their
gradients by the averaged ones. ``norm`` and ``clip`` work like torch's functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.runtime.loss import plain
from shoal.runtime.step.exchange import Exchange

if TYPE_CHECKING:
    from shoal.runtime.parallel import ParallelModel, Pipeline


class ReplicatedModel:
    """The user's module, without a wrapper. This rank holds all its parameters."""

    pipeline = None

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def trainable(self) -> dict[str, Tensor]:
        """Return the parameters that require gradients. A tied parameter appears once."""
        return {plain(n): p for n, p in self.model.named_parameters() if p.requires_grad}

    def collect(self, exchange: Exchange) -> None:
        """Copy the gradients into the exchange's buffers. A missing gradient becomes zero."""
        for name, p in self.trainable().items():
            if (place := exchange.flat.views.get(name)) is None:
                continue
            if p.grad is None:
                place.view.zero_()
            else:
                place.view.copy_(p.grad.to_dense() if p.grad.is_sparse else p.grad)

    def deliver(self, exchange: Exchange) -> None:
        """Make each ``.grad`` a view of the averaged gradient in the exchange's buffers."""
        for name, p in self.trainable().items():
            p.grad = exchange.flat.views[name].view

    def norm(self) -> float:
        """Return the 2-norm over all gradients together."""
        grads = [p.grad for p in self.trainable().values() if p.grad is not None]
        dense = [g.coalesce().values() if g.is_sparse else g for g in grads]
        return float(torch.nn.utils.get_total_norm(dense))

    def clip(self, limit: float, norm: float) -> None:
        """Clip the gradients in place as ``clip_grad_norm_`` does. ``norm`` is their 2-norm."""
        total = torch.tensor(norm, dtype=torch.float64)
        torch.nn.utils.clip_grads_with_norm_(list(self.trainable().values()), limit, total)

    def call(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's output."""
        return self.model(*inputs, **named)


class ShardedModel:
    """This rank's part of a model that torch's FSDP2, DTensor or pipelining has sharded."""

    def __init__(self, parallel: ParallelModel) -> None:
        self.parallel, self.model = parallel, parallel.model

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline that runs the model, or None if the model is not cut into stages."""
        return self.parallel.pipeline

    def trainable(self) -> dict[str, Tensor]:
        """Return this rank's part of each parameter that requires gradients, sharing its memory."""
        frozen = {n for n, p in self.model.named_parameters() if not p.requires_grad}
        return {n: t for n, t in self.parallel.local_parameters().items() if n not in frozen}

    def collect(self, exchange: Exchange) -> None:
        """Copy this rank's part of each gradient into the buffers, or zeros if it is missing."""
        self._shard_gradients()
        grads = self.parallel.local_gradients()
        for name, place in exchange.flat.views.items():
            if name in grads:
                place.view.copy_(grads[name])
            else:
                place.view.zero_()

    @torch.no_grad()
    def _shard_gradients(self) -> None:
        """Give each gradient its parameter's placements, and set a missing gradient to zeros."""
        from torch.distributed.tensor import DTensor

        for p in self.model.parameters():
            grad = p.grad
            if isinstance(p, DTensor) and isinstance(grad, DTensor):
                if grad.placements != p.placements:
                    p.grad = grad.redistribute(p.device_mesh, p.placements)
            elif grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)  # another replica may have a gradient

    def deliver(self, exchange: Exchange) -> None:
        """Copy the averaged gradients into this rank's gradients, in place."""
        for name, grad in self.parallel.local_gradients().items():
            grad.copy_(exchange.flat.views[name].view)

    def norm(self) -> float:
        """Return the 2-norm over all gradients, including the parts on other ranks."""
        from shoal.runtime.parallel import global_norm

        return float(global_norm(self.parallel))

    def clip(self, limit: float, norm: float) -> None:
        """Clip this rank's part of the gradients in place. All ranks of the replica must do so."""
        from shoal.runtime.parallel import clip

        clip(self.parallel, limit, norm=norm)

    def call(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's output. All ranks of the replica must call this together."""
        if self.pipeline is None:
            return self.model(*inputs, **named)
        if named:
            raise UsageError("a pipeline cannot run a dict: use a batch (inputs..., target)")
        return self.pipeline.forward(inputs if len(inputs) > 1 else inputs[0])


ModelPart: TypeAlias = ReplicatedModel | ShardedModel
"""A whole model, or this rank's part of one."""
