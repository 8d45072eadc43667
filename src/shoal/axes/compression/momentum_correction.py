"""Momentum correction: each worker applies momentum before compression.

If the optimizer applies momentum, an entry that waits in a residual gets its momentum only after it
was sent. If momentum is applied before compression, the entry is sent together with its momentum.

References:
    Lin et al., `Deep gradient compression <https://arxiv.org/abs/1712.01887>`_, 2018, section 3.1.
"""

from __future__ import annotations

from typing import Any

from shoal.axes.compression.compressor import Compressor, Trait, Value, check_inner
from shoal.axes.compression.error_feedback import protect
from shoal.axes.compression.kit.residual import zeros
from shoal.errors import Conflict, ConflictError
from shoal.flow import Agreed, Flow
from shoal.notation import check_momentum, typed


def momentum_correction(inner: Compressor, momentum: float = 0.9) -> Compressor:
    """Compress the momentum u = m u + g with ``inner``, in place of the gradient g.

    The compressor applies momentum, so the optimizer must have none.

    Args:
        inner: a lossy compressor, such as ``error_feedback(topk(0.01))``.
        momentum: m, in [0, 1).

    Example: ``momentum_correction(error_feedback(topk(0.25)))``,
    ``momentum_correction(error_feedback(powersgd(2)), 0.5)``.
    """
    example = "momentum_correction(error_feedback(topk(0.01)))"
    check_inner(f"momentum_correction({inner})", inner, example)
    check_momentum("momentum_correction", momentum)
    _refuse(inner)
    conserving = Trait.CONSERVING in inner.traits  # then state[0] must be the residual

    def init(value: Value) -> tuple[Any, ...]:
        start = inner.init(value)
        return (*(start if conserving else (start,)), zeros(value.tensor))

    def flow(value: Value, state: tuple[Any, ...], round: int) -> Flow:
        *inner_state, u = state
        u = value.tensor + u * momentum
        before = tuple(inner_state) if conserving else inner_state[0]
        inner_flow = inner.flow(value.with_tensor(u), before, round)
        mean, mine, after = yield from protect(u, inner_flow)
        return Agreed(mean, mine, (*(after if conserving else (after,)), u))

    option = "" if momentum == 0.9 else f", {typed(momentum)}"
    traits = (inner.traits | Trait.MOMENTUM) & ~(Trait.ELEMENTWISE | Trait.UNBIASED)
    name = f"momentum_correction({inner.name}{option})"
    return Compressor(name, traits, flow, init, inner.add, timed=inner.timed)


def _refuse(inner: Compressor) -> None:
    if Trait.LOSSLESS in inner.traits:
        why = f"{inner.name} loses nothing, so nothing is sent late"
        instead = f"use {inner.name}, and momentum in the optimizer"
    elif Trait.MOMENTUM in inner.traits:
        why, instead = f"{inner.name} applies its own momentum", f"use {inner.name} alone"
    else:
        return
    raise ConflictError([Conflict(f"momentum_correction x {inner.name}", why, instead)])
