"""Compute a scalar loss from a batch (tuple, dict or other object), and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from shoal.errors import UsageError

Loss = Callable[[Any, Any], Tensor]


class LossOutput(NamedTuple):
    """The loss of a batch, the model's output and the target."""

    loss: Tensor
    output: Any
    target: Any


def compute_loss(model: Callable[..., Any], batch: Any, loss: Loss | None) -> LossOutput:
    """Call the model and the loss function on a batch. Return loss, output and target.

    * For a tuple or list ``(inputs..., target)``, the loss is ``loss(model(inputs...), target)``.
      If the batch has only one member, this member is both the input and the target.
    * For a dict, the loss is ``loss(model(**batch), batch)``.
    * For any other batch, the loss is ``loss(model(batch), batch)``.
    * Without a loss function, the loss is ``output.loss``, ``output["loss"]``, or the output itself
      if it is a scalar. Then all members of a tuple or list are inputs, and the target is not used.
    """
    inputs, target = _split_batch(batch, loss is None)
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    value = _loss_in(output) if loss is None else loss(output, target)
    return LossOutput(_scalar(value), output, target)


def differentiable(loss: Any) -> Tensor:
    """Return a loss as a 0-dimensional tensor; raise if it is complex or needs no gradient."""
    scalar = _scalar(loss)
    if not scalar.requires_grad or scalar.is_complex():
        why = "a complex number" if scalar.is_complex() else "not connected to any parameter"
        raise UsageError(
            f"the loss is {why}, so it has no gradient: compute it from the model's output "
            "without .detach(), .item(), torch.no_grad() or a comparison, and keep it real"
        )
    return scalar


def differentiate(loss: Tensor, scale: float) -> None:
    """Run backward of ``scale`` times the loss."""
    try:
        (loss if scale == 1 else loss * scale).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise UsageError(
            "run.backward was called twice on one graph, but the first call frees the graph: call "
            "run.forward again, or add the losses and call run.backward once, on the sum"
        ) from error


def split_target(batch: Any) -> tuple[tuple[Any, ...], Any]:
    """Return (inputs, target) of a batch ``(inputs..., target)``, for a pipeline."""
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        kind = type(batch).__name__
        raise UsageError(f"a pipeline cannot run a batch of type {kind}: use (inputs..., target)")
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
        f"there is no loss: the model returned {type(output).__name__} without a loss; pass "
        "loss=... to distribute, or pass labels to a model that computes its loss"
    )


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        kind = type(loss).__name__
        raise UsageError(f"the loss is a {kind}, not a tensor: return a scalar tensor")
    if loss.numel() != 1:
        raise UsageError(
            f"the loss has shape {tuple(loss.shape)}, not one number: average it over the batch, "
            "for example with .mean()"
        )
    return loss.reshape(()) if loss.dim() else loss


def plain(name: str) -> str:
    """Return a parameter name without each ``_orig_mod.`` that torch.compile has added."""
    return name.replace("_orig_mod.", "")
