"""Momentum on each worker, before compression: what is sent late has the momentum it is due.

With momentum in the optimizer, an entry that waits in a residual arrives as one late gradient, and
its momentum starts only then.

References:
    Lin et al., `Deep gradient compression <https://arxiv.org/abs/1712.01887>`_, 2018, section 3.1.
"""

from __future__ import annotations

from typing import Any

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.error_feedback import keeping
from shoal.axes.compression.kit.residual import zeros
from shoal.axes.compression.kit.sparse import check_momentum
from shoal.errors import BadArgument, Conflict, ConflictError
from shoal.flow import Agreed, Flow
from shoal.notation import typed


def momentum_correction(inner: Compressor, momentum: float = 0.9) -> Compressor:
    """Give ``inner`` the velocity u = m u + g in place of the gradient g.

    It keeps the momentum itself: the optimizer has none.

    Args:
        inner: a lossy compressor, such as ``error_feedback(topk(0.01))``.
        momentum: m, in [0, 1).

    Example: ``momentum_correction(error_feedback(topk(0.25)))``,
    ``momentum_correction(error_feedback(powersgd(2)), 0.5)``.
    """
    if not isinstance(inner, Compressor):
        raise BadArgument(
            f"momentum_correction({inner})",
            "it wraps a compressor, as in momentum_correction(error_feedback(topk(0.01)))",
        )
    check_momentum("momentum_correction", momentum)
    _refuse(inner)
    conserving = Trait.CONSERVING in inner.traits  # its residual stays the first item

    def init(value: Value) -> tuple[Any, ...]:
        held = inner.init(value)
        return (*(held if conserving else (held,)), zeros(value.tensor))

    def flow(value: Value, state: tuple[Any, ...], round: int) -> Flow:
        *kept, u = state
        u = value.tensor + u * momentum
        held = tuple(kept) if conserving else kept[0]
        opened = inner.flow(value.with_tensor(u), held, round)
        (mean, own, held), u = yield from keeping(opened, u)
        return Agreed(mean, own, (*(held if conserving else (held,)), u))

    told = "" if momentum == 0.9 else f", {typed(momentum)}"
    traits = (inner.traits | Trait.MOMENTUM) & ~(Trait.ELEMENTWISE | Trait.UNBIASED)
    name = f"momentum_correction({inner.name}{told})"
    return Compressor(name, traits, flow, init, inner.add, timed=inner.timed)


def _refuse(inner: Compressor) -> None:
    what = f"momentum_correction x {inner.name}"
    if Trait.LOSSLESS in inner.traits:
        why, instead = "nothing is sent late", f"{inner.name}, and momentum in the optimizer"
        raise ConflictError([Conflict(what, why, instead)])
    if Trait.MOMENTUM in inner.traits:
        raise ConflictError([Conflict(what, "it keeps its own momentum already", inner.name)])
