"""Error feedback: add the compression error of a round to the value of the next round.

References:
    Karimireddy et al., `Error feedback fixes SignSGD <https://arxiv.org/abs/1901.09847>`_, 2019.
    Stich et al., `Sparsified SGD with memory <https://arxiv.org/abs/1809.07599>`_, 2018.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value, check_inner
from shoal.axes.compression.kit.residual import add_residual, zeros
from shoal.errors import Conflict, ConflictError
from shoal.flow import Agreed, Ask, Flow, Mean, through


def error_feedback(inner: Compressor) -> Compressor:
    """Compress with ``inner``; keep what it did not send, and add that to the next value.

    Args:
        inner: a contractive compressor, such as ``topk(0.01)`` or ``powersgd(4)``.

    Example: ``error_feedback(topk(0.25))``, ``error_feedback(powersgd(2))``,
    ``error_feedback(cast(bfloat16))``, ``error_feedback(random_k(0.25))``.
    """
    check_inner(f"error_feedback({inner})", inner, "error_feedback(topk(0.01))")
    inner = inner.contraction or inner
    _refuse(inner)

    def init(value: Value) -> tuple[Tensor, Any]:
        return zeros(value.tensor), inner.init(value)

    def flow(value: Value, state: tuple[Tensor, Any], round: int) -> Flow:
        residual, inner_state = state
        v = add_residual(value.tensor, residual)  # v = g + e
        inner_flow = inner.flow(value.with_tensor(v, value.out), inner_state, round)
        mean, mine, inner_state = yield from protect(v, inner_flow)
        mine.subtract_from(v)  # e = v - C(v)
        return Agreed(mean, mine, (v, inner_state))

    traits = (inner.traits | Trait.CONSERVING) & ~(Trait.ELEMENTWISE | Trait.UNBIASED)
    return Compressor(f"error_feedback({inner.name})", traits, flow, init, inner.add)


def protect(tensor: Tensor, flow: Flow) -> Flow:
    """Run a flow that reads ``tensor``. Send a copy if a Mean would let the wire overwrite it."""
    memory = tensor.untyped_storage().data_ptr()

    def answer(ask: Ask) -> Generator[Ask, Any, Any]:
        if isinstance(ask, Mean) and ask.tensor.untyped_storage().data_ptr() == memory:
            ask = Mean(ask.tensor.clone())
        return (yield ask)

    return through(flow, answer)


def _refuse(inner: Compressor) -> None:
    instead = f"use {inner.name} alone"
    if Trait.LOSSLESS in inner.traits:
        why = f"{inner.name} loses nothing, so there is no error to feed back"
    elif Trait.CONSERVING in inner.traits:
        why = f"{inner.name} keeps its own residual already"
    elif Trait.MOMENTUM in inner.traits:
        why = f"{inner.name} would add the residual to its momentum once more"
        instead = "use momentum_correction(error_feedback(...))"
    elif Trait.CONTRACTIVE not in inner.traits:
        why = f"{inner.name} is not contractive, so the residual grows without bound"
    else:
        return
    raise ConflictError([Conflict(f"error_feedback x {inner.name}", why, instead)])
