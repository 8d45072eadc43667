"""Warm-up: the first rounds travel as they are, while gradients are large and change fast.

References:
    Lin et al., `Deep gradient compression <https://arxiv.org/abs/1712.01887>`_, 2018, section 3.3.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value, add_dense
from shoal.errors import BadArgument
from shoal.flow import Agreed, Flow, Mean


def after(steps: int, inner: Compressor) -> Compressor:
    """Exact at first, then ``inner``, which counts its own rounds from there.

    Args:
        steps: rounds in which every number is sent as it is.
        inner: what comes after.

    Example: ``after(1, error_feedback(topk(0.25)))``, ``after(2, powersgd(2))``,
    ``after(1, cast(bfloat16))``.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise BadArgument(f"after({steps}, {inner})", "steps must be a whole number >= 1")
    if not isinstance(inner, Compressor):
        raise BadArgument(
            f"after({steps}, {inner})",
            "it wraps a compressor, as in after(100, error_feedback(topk(0.01)))",
        )
    lossless = Trait.LOSSLESS in inner.traits

    def flow(value: Value, state: Any, round: int) -> Flow:
        if round >= steps:
            return (yield from inner.flow(value, state, round - steps))
        sent = value.tensor if lossless else value.tensor.clone()  # wires overwrite sums
        return Agreed((yield Mean(sent)), value.tensor, state)

    def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
        """A message of the first rounds is the whole tensor and nothing else."""
        whole = len(parts) == 1 and parts[0].dtype == into.dtype and parts[0].shape == into.shape
        decode = add_dense if whole or inner.add is None else inner.add
        decode(parts, into, weight)

    name = f"after({steps}, {inner.name})"
    return Compressor(
        name, inner.traits, flow, inner.init, add, gamma=inner.gamma, timed=inner.timed
    )
