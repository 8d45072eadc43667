"""Small tensors one way, large ones another: what is small is not worth the trouble.

References:
    Renggli et al., `SparCML <https://arxiv.org/abs/1802.08021>`_, 2019 (dense or sparse by size).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.errors import BadArgument
from shoal.flow import Agreed, Flow
from shoal.notation import check_nbytes, nbytes_text

BOTH = Trait.LOSSLESS | Trait.UNBIASED | Trait.SLICEABLE | Trait.ONE_SHOT | Trait.SUMS
EITHER = Trait.MERGES | Trait.MOMENTUM | Trait.FACTORS
OR_LOSSLESS = (Trait.CONTRACTIVE, Trait.CONSERVING, Trait.TRACKS)


def by_size(threshold: int, small: Compressor, large: Compressor) -> Compressor:
    """Choose the form of each tensor by its size.

    Args:
        threshold: bytes from which on a tensor is large.
        small: how tensors under ``threshold`` travel, such as ``exact``.
        large: how all others do.

    Example: ``by_size(256, exact, error_feedback(topk(0.25)))``,
    ``by_size(200, cast(bfloat16), powersgd(1))``.
    """
    _refuse(threshold, small, large)
    traits = _traits(small, large)

    def chosen(tensor: Tensor) -> Compressor:
        return small if tensor.numel() * tensor.element_size() < threshold else large

    def shows(member: Compressor) -> bool:
        """Whether a residual, always zero, must be shown for one that loses nothing."""
        return Trait.CONSERVING in traits and Trait.CONSERVING not in member.traits

    def init(value: Value) -> Any:
        member = chosen(value.tensor)
        held = member.init(value)
        return (torch.zeros_like(value.tensor), held) if shows(member) else held

    def flow(value: Value, state: Any, round: int) -> Flow:
        member, given = chosen(value.tensor), value.tensor
        exact = Trait.LOSSLESS in member.traits and Trait.LOSSLESS not in traits
        if exact or (Trait.SUMS in member.traits and Trait.SUMS not in traits):
            value = value.copied()  # what was given is still needed
        held = state[1] if shows(member) else state
        mean, own, held = yield from member.flow(value, held, round)
        kept = (state[0], held) if shows(member) else held
        return Agreed(mean, given if exact else own, kept)

    def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
        decode = chosen(into).add
        if decode is None:
            raise BadArgument(name, f"{chosen(into)} sends nothing that is added up elsewhere")
        decode(parts, into, weight)

    name = f"by_size({nbytes_text(threshold)}, {small.name}, {large.name})"
    gamma, timed = min(small.gamma, large.gamma), small.timed or large.timed
    return Compressor(name, traits, flow, init, add, gamma=gamma, timed=timed)


def _refuse(threshold: int, *members: Compressor) -> None:
    check_nbytes("by_size", threshold)
    if not all(isinstance(member, Compressor) for member in members):
        small, large = members
        raise BadArgument(
            f"by_size({nbytes_text(threshold)}, {small}, {large})",
            "it takes two compressors, as in by_size(64KB, exact, topk(0.01))",
        )


def _traits(small: Compressor, large: Compressor) -> Trait:
    """What holds of both; what either needs; and what losing nothing is as good as."""
    both, either = small.traits & large.traits, small.traits | large.traits
    found = (both & BOTH) | (either & EITHER)
    for trait in OR_LOSSLESS:
        has = [m for m in (small, large) if trait in m.traits]
        rest = [m for m in (small, large) if trait not in m.traits]
        if has and all(Trait.LOSSLESS in m.traits for m in rest):
            found |= trait
    return found
