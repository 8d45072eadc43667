"""Choose a compressor by the size of the tensor: compressing a small tensor saves no time.

References:
    Renggli et al., `SparCML <https://arxiv.org/abs/1802.08021>`_, 2019 (dense or sparse by size).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.errors import BadArgument
from shoal.flow import Agreed, Dense, Flow, Sent
from shoal.notation import check_nbytes, nbytes_text


def by_size(threshold: int, small: Compressor, large: Compressor) -> Compressor:
    """Compress tensors of less than ``threshold`` bytes with ``small``, and others with ``large``.

    Args:
        threshold: a tensor of this many bytes or more is large.
        small: the compressor for small tensors, such as ``exact``.
        large: the compressor for large tensors.

    Example: ``by_size(256, exact, error_feedback(topk(0.25)))``,
    ``by_size(200, cast(bfloat16), powersgd(1))``.
    """
    check_nbytes("by_size", threshold)
    if not all(isinstance(member, Compressor) for member in (small, large)):
        call = f"by_size({nbytes_text(threshold)}, {small}, {large})"
        raise BadArgument(call, "small and large must be compressors, such as exact, topk(0.01)")
    traits = small.traits.by_tensor(large.traits)

    def choice(tensor: Tensor) -> Compressor:
        return small if tensor.numel() * tensor.element_size() < threshold else large

    def needs_residual(member: Compressor) -> bool:
        """Return whether the state needs a residual of zeros, because ``member`` has none."""
        return Trait.CONSERVING in traits and Trait.CONSERVING not in member.traits

    def init(value: Value) -> Any:
        member = choice(value.tensor)
        state = member.init(value)
        return (torch.zeros_like(value.tensor), state) if needs_residual(member) else state

    def flow(value: Value, state: Any, round: int) -> Flow:
        member = choice(value.tensor)
        lossless = Trait.LOSSLESS in member.traits and Trait.LOSSLESS not in traits
        copy: Sent | None = Dense(value.tensor.clone()) if lossless else None
        if not lossless and Trait.SUMS in member.traits and Trait.SUMS not in traits:
            value = value.copied()  # the wire may overwrite the tensor of a Mean
        padded = needs_residual(member)
        mean, mine, after = yield from member.flow(value, state[1] if padded else state, round)
        return Agreed(mean, copy or mine, (state[0], after) if padded else after)

    def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
        decode = choice(into).add
        if decode is None:
            raise BadArgument(name, f"{choice(into)} has no add() to decode its messages with")
        decode(parts, into, weight)

    name = f"by_size({nbytes_text(threshold)}, {small.name}, {large.name})"
    gamma, timed = min(small.gamma, large.gamma), small.timed or large.timed
    return Compressor(name, traits, flow, init, add, gamma=gamma, timed=timed)
