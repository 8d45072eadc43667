"""Where a replica's gradients come from: plain parameters, or the parts of a model that is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.runtime.loss import Loss, plain, split_target
from shoal.runtime.step.exchange import Exchange

if TYPE_CHECKING:
    from shoal.runtime.parallel import ParallelModel, Pipeline


class ReplicatedModel:
    """A model that this rank holds whole.

    Args:
        model: the user's own, not wrapped.
    """

    pipeline = None

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def trainable(self) -> dict[str, Tensor]:
        """Parameters that are not frozen; tied ones once."""
        return {plain(n): p for n, p in self.model.named_parameters() if p.requires_grad}

    def collect(self, agreement: Exchange) -> None:
        """Copy gradients in; a missing one counts as zero."""
        for name, p in self.trainable().items():
            if (place := agreement.flats.places.get(name)) is None:
                continue
            if p.grad is None:
                place.view.zero_()
            else:
                place.view.copy_(p.grad.to_dense() if p.grad.is_sparse else p.grad)

    def deliver(self, agreement: Exchange) -> None:
        """Gradients become views of the agreed numbers."""
        for name, p in self.trainable().items():
            p.grad = agreement.flats.places[name].view

    def norm(self) -> float:
        """Over all gradients there are."""
        return float(torch.nn.utils.get_total_norm(self._grads()))

    def clip(self, limit: float, norm: float) -> None:
        """As torch's clip_grad_norm_ does, with the norm already known."""
        torch.nn.utils.clip_grads_with_norm_(
            list(self.trainable().values()), limit, torch.tensor(norm, dtype=torch.float64)
        )

    def _grads(self) -> list[Tensor]:
        grads = [p.grad for p in self.trainable().values() if p.grad is not None]
        return [g.coalesce().values() if g.is_sparse else g for g in grads]

    def call(self, *inputs: Any, **named: Any) -> Any:
        """The model itself."""
        return self.model(*inputs, **named)

    def flow_through(
        self, pieces: Sequence[Any], loss: Loss | None, scales: Sequence[float]
    ) -> Tensor:
        """Only a model that is cut into stages does."""
        raise UsageError("this model is not cut into stages")


class ShardedModel:
    """A model of which this rank holds a part.

    Args:
        placed: what torch's FSDP2, DTensor and pipelining made of it.
    """

    def __init__(self, placed: ParallelModel) -> None:
        self.placed = placed
        self.model = placed.model

    @property
    def pipeline(self) -> Pipeline | None:
        """How to run it, where it is cut into stages."""
        return self.placed.pipeline

    def trainable(self) -> dict[str, Tensor]:
        """My part of each parameter, sharing its storage."""
        frozen = {n for n, p in self.model.named_parameters() if not p.requires_grad}
        return {n: t for n, t in self.placed.local_parameters().items() if n not in frozen}

    def collect(self, agreement: Exchange) -> None:
        """Copy my part of the gradients in."""
        self._cut_alike()
        grads = self.placed.local_gradients()
        for name, place in agreement.flats.places.items():
            if name in grads:
                place.view.copy_(grads[name])
            else:
                place.view.zero_()

    @torch.no_grad()
    def _cut_alike(self) -> None:
        """Gradients as their parameters are: torch may leave one whole whose parameter is cut."""
        from torch.distributed.tensor import DTensor

        for p in self.model.parameters():
            grad = p.grad
            if isinstance(p, DTensor) and isinstance(grad, DTensor):
                if grad.placements != p.placements:
                    p.grad = grad.redistribute(p.device_mesh, p.placements)
            elif grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)  # another replica may have one

    def deliver(self, agreement: Exchange) -> None:
        """Copy the agreed part back to where torch keeps it."""
        for name, grad in self.placed.local_gradients().items():
            grad.copy_(agreement.flats.places[name].view)

    def norm(self) -> float:
        """Over all ranks of the replica."""
        from shoal.runtime.parallel import global_norm

        return float(global_norm(self.placed))

    def clip(self, limit: float, norm: float) -> None:
        """Every rank scales its part alike."""
        from shoal.runtime.parallel import clip

        clip(self.placed, limit, norm=norm)

    def call(self, *inputs: Any, **named: Any) -> Any:
        """The whole model's output, on every rank of the replica."""
        if self.pipeline is None:
            return self.model(*inputs, **named)
        if named:
            raise UsageError("a pipeline takes batches (inputs..., target), not dicts")
        return self.pipeline.forward(inputs if len(inputs) > 1 else inputs[0])

    def flow_through(
        self, pieces: Sequence[Any], loss: Loss | None, scales: Sequence[float]
    ) -> Tensor:
        """Forward and backward of micro-batches through the stages; the weighted loss."""
        if self.pipeline is None or loss is None:
            raise UsageError("a pipeline needs loss=...: the last stage computes it")
        cut = [split_target(piece) for piece in pieces]
        inputs = [given if len(given) > 1 else given[0] for given, _ in cut]
        targets = [target for _, target in cut]
        return self.pipeline.forward_backward(inputs, targets, loss, weights=scales)
