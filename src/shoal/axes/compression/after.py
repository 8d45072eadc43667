"""Warm-up: send tensors uncompressed in the first rounds, when gradients are large and change fast.

References:
    Lin et al., `Deep gradient compression <https://arxiv.org/abs/1712.01887>`_, 2018, section 3.3.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value, add_dense, check_inner
from shoal.errors import BadArgument
from shoal.flow import Agreed, Dense, Flow, Mean
from shoal.notation import is_whole


def after(steps: int, inner: Compressor) -> Compressor:
    """Send tensors uncompressed in the first ``steps`` rounds, and use ``inner`` from then on.

    Args:
        steps: number of rounds without compression.
        inner: the compressor of all later rounds. The first of these rounds is its round 0.

    Example: ``after(1, error_feedback(topk(0.25)))``, ``after(2, powersgd(2))``,
    ``after(1, cast(bfloat16))``.
    """
    if not is_whole(steps, 1):
        raise BadArgument(f"after({steps}, {inner})", "steps must be a whole number >= 1")
    check_inner(f"after({steps}, {inner})", inner, "after(100, error_feedback(topk(0.01)))")
    lossless = Trait.LOSSLESS in inner.traits

    def flow(value: Value, state: Any, round: int) -> Flow:
        if round >= steps:
            return (yield from inner.flow(value, state, round - steps))
        # The wire may overwrite value.tensor, so ``mine`` is a copy, except if inner is lossless.
        mine = Dense(value.tensor if lossless else value.tensor.clone())
        return Agreed((yield Mean(value.tensor)), mine, state)

    def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
        """Add a message, which is the tensor itself in the first rounds, and ``inner``'s later."""
        whole = len(parts) == 1 and parts[0].dtype == into.dtype and parts[0].shape == into.shape
        decode = add_dense if whole or inner.add is None else inner.add
        decode(parts, into, weight)

    name, gamma = f"after({steps}, {inner.name})", inner.gamma
    return Compressor(name, inner.traits, flow, inner.init, add, gamma=gamma, timed=inner.timed)
