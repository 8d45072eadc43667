"""signSGD: one bit a number; the workers vote, and the majority's sign is the step.

References:
    Bernstein et al., `signSGD <https://arxiv.org/abs/1802.04434>`_, 2018, Algorithms 1 and 2.
    Bernstein et al., `signSGD with majority vote <https://arxiv.org/abs/1810.05291>`_, 2019,
    Algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value, gathered, nothing
from shoal.axes.compression.kit.bit_packing import pack, unpack
from shoal.axes.compression.kit.blocks import add_pieces, wide
from shoal.axes.compression.kit.residual import next_to, zeros
from shoal.errors import BadArgument
from shoal.flow import Agreed, Flow
from shoal.notation import is_number, typed


def sign(momentum: float = 0.0) -> Compressor:
    """Vote by sign on the direction of every number; each moves by the learning rate, or stays.

    Takes 1 bit a number and one number a tensor, 0 where all is zero. With momentum it is Signum:
    each worker votes with the sign of its running mean, and the optimizer has no momentum of its
    own. Lengths are lost, so the learning rate is that of Adam, not that of SGD.

    Args:
        momentum: share of the running mean that is kept each round, in [0, 1); 0.9 in the paper.

    Example: ``sign``, ``sign(0.9)``.

    Differs from the paper: a bit cannot say zero, so a zero in a tensor that has others counts as
    positive in even rounds and negative in odd ones, which cancels; a tie stays where it is.
    """
    if not (is_number(momentum) and 0 <= momentum < 1):
        raise BadArgument(f"sign({momentum})", "momentum must lie in [0, 1), for example sign(0.9)")

    def init(value: Value) -> Tensor:
        return zeros(value.tensor)

    def flow(value: Value, state: Tensor | None, round: int) -> Flow:
        m = value.tensor if state is None else running(state, value.tensor, momentum)
        parts = encode(m.reshape(-1), round)
        votes, mine = yield from gathered(value, parts, add)
        agreed = votes.sign().add_(votes, alpha=0)  # the sign of NaN is 0, and it must be seen
        return Agreed(agreed, mine, None if state is None else m)

    traits = Trait.SLICEABLE | Trait.ONE_SHOT | Trait.MERGES | Trait.UNSCALED
    if momentum == 0:
        return Compressor("sign", traits, flow, nothing, add, width=1)
    name = f"sign({typed(momentum)})"
    return Compressor(name, traits | Trait.MOMENTUM, flow, init, add, width=1)


def running(mean: Tensor, now: Tensor, momentum: float) -> Tensor:
    """The running mean, one round on."""
    return torch.lerp(mean, now, 1 - momentum, out=next_to(mean, now))


def encode(flat: Tensor, round: int) -> tuple[Tensor, ...]:
    """The signs, and 1; or 0 where all is zero, or NaN where something is not finite."""
    total = torch.linalg.vector_norm(flat, 1, dtype=wide(flat.dtype)).view(1)
    voice = torch.where(total == 0, total, total * 0 + 1)
    return pack(flat < 0 if round % 2 == 0 else flat <= 0, 1), voice


def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
    """Add one vote: 1 where the bit is not set, -1 where it is."""
    negative, voice = unpack(parts[0], 1, into.numel()), parts[1]
    add_pieces(into, weight, lambda p: negative[p].to(voice.dtype).mul_(-2).add_(1).mul_(voice))
