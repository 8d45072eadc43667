"""Compute a scalar loss from a batch of any structure, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from shoal.errors import UsageError

Loss = Callable[[Any, Any], Tensor]


class LossOutput(NamedTuple):
    """A loss, the model's output and the target."""

    loss: Tensor
    output: Any
    target: Any


def compute_loss(model: Callable[..., Any], batch: Any, loss: Loss | None) -> LossOutput:
    """Call the model on the batch's inputs and the loss on its target.

    * ``(inputs..., target)``: ``loss(model(inputs...), target)``;
    * a dict: ``model(**batch)``, and ``loss(output, batch)``;
    * anything else: ``loss(model(batch), batch)``;
    * no loss: ``loss`` of the model's output, or the scalar that it returns; then all members of a
      tuple are inputs.
    """
    inputs, target = _split_batch(batch, loss is None)
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    value = _loss_in(output) if loss is None else loss(output, target)
    return LossOutput(_scalar(value), output, target)


def differentiable(loss: Any) -> Tensor:
    """Return a loss as a scalar; refuse one that has no gradient."""
    scalar = _scalar(loss)
    if not scalar.requires_grad or scalar.is_complex():
        what = "a complex number" if scalar.is_complex() else "not connected to any parameter"
        raise UsageError(
            f"the loss is {what}, so it has no gradient: compute it from the model's output "
            "without .detach(), .item(), torch.no_grad() or a comparison, and keep it real"
        )
    return scalar


def differentiate(loss: Tensor, scale: float) -> None:
    """Run backward of ``scale`` times a loss."""
    try:
        (loss if scale == 1 else loss * scale).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise UsageError(
            "run.backward ran twice on one graph, and the first time freed it: call run.forward "
            "again, or add the losses and call run.backward on the sum"
        ) from error


def split_target(batch: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the inputs and the target of a tuple batch, for a pipeline."""
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        kind = type(batch).__name__
        raise UsageError(f"a pipeline takes batches (inputs..., target), not {kind}")
    return tuple(batch[:-1]), batch[-1]


def _split_batch(batch: Any, model_has_loss: bool) -> tuple[tuple[Any, ...] | dict[str, Any], Any]:
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        if model_has_loss:
            return tuple(batch), None
        if len(batch) >= 2:
            return tuple(batch[:-1]), batch[-1]
        return tuple(batch), batch[0]
    if isinstance(batch, Mapping):
        return dict(batch), batch
    return (batch,), batch


def _loss_in(output: Any) -> Any:
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if getattr(output, "loss", None) is not None:
        return output.loss
    if isinstance(output, Tensor) and output.dim() == 0:
        return output
    raise UsageError(
        f"no loss: the model returns {type(output).__name__} without a loss; pass loss=... to "
        "distribute, or give the model its labels"
    )


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        kind = type(loss).__name__
        raise UsageError(f"the loss is a {kind}, not a tensor: return a torch scalar")
    if loss.numel() != 1:
        raise UsageError(
            f"the loss has shape {tuple(loss.shape)}, not one number: average it over the batch, "
            "for example with .mean()"
        )
    return loss.reshape(()) if loss.dim() else loss


def plain(name: str) -> str:
    """Remove from a name the prefix that torch.compile adds."""
    return name.replace("_orig_mod.", "")
