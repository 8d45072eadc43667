"""What was not sent is added to what comes next.

References:
    Karimireddy et al., `Error feedback fixes SignSGD <https://arxiv.org/abs/1901.09847>`_, 2019.
    Stich et al., `Sparsified SGD with memory <https://arxiv.org/abs/1809.07599>`_, 2018.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.errors import BadArgument, Conflict, ConflictError
from shoal.flow import Agreed, Ask, Flow, Mean, through


def error_feedback(inner: Compressor) -> Compressor:
    """Keep what ``inner`` lost and send it later.

    Args:
        inner: a contractive compressor, such as ``topk(0.01)`` or ``powersgd(4)``.

    Example: ``error_feedback(topk(0.25))``, ``error_feedback(powersgd(2))``,
    ``error_feedback(cast(bfloat16))``, ``error_feedback(random_k(0.25))``.
    """
    if not isinstance(inner, Compressor):
        raise BadArgument(
            f"error_feedback({inner})",
            "it wraps a compressor, for example error_feedback(topk(0.01))",
        )
    _refuse(inner)
    if inner.feedback is not None:
        return inner.feedback

    def init(value: Value) -> tuple[Any, Any]:
        return torch.zeros_like(value.tensor), inner.init(value)

    def flow(value: Value, state: tuple[Any, Any], round: int) -> Flow:
        residual, held = state
        wanted = value.tensor + residual
        opened = inner.flow(value.with_tensor(wanted), held, round)
        end, kept = yield from keeping(opened, wanted)
        mine = end.mine
        return Agreed(end.mean, mine, (kept - mine, end.state))

    traits = (inner.traits | Trait.CONSERVING) & ~(Trait.ELEMENTWISE | Trait.UNBIASED)
    return Compressor(f"error_feedback({inner.name})", traits, flow, init, inner.add)


def keeping(flow: Flow, tensor: Tensor) -> Generator[Ask, Any, tuple[Agreed, Tensor]]:
    """Run a flow on a tensor of mine; what it ends with, and the tensor as it was before.

    Copied only when a wire is about to overwrite it, which it may where a mean is asked of it.
    """
    kept, place = tensor, tensor.untyped_storage().data_ptr()

    def answer(ask: Ask) -> Generator[Ask, Any, Any]:
        nonlocal kept
        means = isinstance(ask, Mean) and ask.tensor.untyped_storage().data_ptr() == place
        if means and kept is tensor:
            kept = tensor.clone()
        return (yield ask)

    end = yield from through(flow, answer)
    return end, kept


def _refuse(inner: Compressor) -> None:
    what = f"error_feedback x {inner.name}"
    if Trait.LOSSLESS in inner.traits:
        raise ConflictError([Conflict(what, "nothing is lost, so nothing is fed back", inner.name)])
    if Trait.CONSERVING in inner.traits:
        raise ConflictError([Conflict(what, "it keeps its own residual already", inner.name)])
    if Trait.MOMENTUM in inner.traits:
        why = "what it lost would enter its momentum once more"
        raise ConflictError([Conflict(what, why, "momentum_correction(error_feedback(...))")])
    if Trait.CONTRACTIVE not in inner.traits and inner.feedback is None:
        why = "it is not contractive: the residual grows without bound"
        raise ConflictError([Conflict(what, why, f"{inner.name} alone")])
