"""signSGD: send one bit per number, its sign. The result is the majority of the workers' signs.

References:
    Bernstein et al., `signSGD <https://arxiv.org/abs/1802.04434>`_, 2018, Algorithms 1 and 2.
    Bernstein et al., `signSGD with majority vote <https://arxiv.org/abs/1810.05291>`_, 2019,
    Algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value, nothing
from shoal.axes.compression.kit.bit_packing import pack, unpack
from shoal.axes.compression.kit.blocks import add_pieces, wide
from shoal.axes.compression.kit.residual import other_buffer, zeros
from shoal.errors import BadArgument
from shoal.flow import Agreed, Flow, Gather
from shoal.notation import is_number, typed


def sign(momentum: float = 0.0) -> Compressor:
    """Send the sign of each number. The result is the majority vote, which is -1, 0 or 1.

    A message has 1 bit per number, and a weight per tensor, which is 0 if the whole tensor is zero.
    With SGD each parameter changes by the learning rate or not at all, so choose a learning rate as
    for Adam. With momentum it is Signum: each worker votes with the sign of its running mean, and
    the optimizer must have no momentum.

    Args:
        momentum: factor of the running mean in each round, in [0, 1); 0.9 in the paper.

    Example: ``sign``, ``sign(0.9)``.

    Differs from the paper: a tie gives 0. One bit cannot encode zero, so a zero in a tensor that is
    not all zero counts as positive in even rounds and as negative in odd rounds.
    """
    if not (is_number(momentum) and 0 <= momentum < 1):
        raise BadArgument(f"sign({momentum})", "momentum must lie in [0, 1), for example sign(0.9)")

    def init(value: Value) -> Tensor:
        return zeros(value.tensor)

    def flow(value: Value, state: Tensor | None, round: int) -> Flow:
        m = value.tensor
        if state is not None:  # the state is the running mean
            m = torch.lerp(state, m, 1 - momentum, out=other_buffer(state, m))
        ask = Gather(encode(m.reshape(-1), round), add, like=value.tensor)
        votes = yield ask
        majority = votes.sign().add_(votes, alpha=0)  # sign() turns NaN into 0; NaN * 0 restores it
        return Agreed(majority, ask, None if state is None else m)

    traits = Trait.SLICEABLE | Trait.ONE_SHOT | Trait.MERGES | Trait.UNSCALED
    if momentum == 0:
        return Compressor("sign", traits, flow, nothing, add, width=1)
    name = f"sign({typed(momentum)})"
    return Compressor(name, traits | Trait.MOMENTUM, flow, init, add, width=1)


def encode(flat: Tensor, round: int) -> tuple[Tensor, ...]:
    """Return signs and a weight: 0 if all numbers are 0, NaN if one is not finite, otherwise 1."""
    total = torch.linalg.vector_norm(flat, 1, dtype=wide(flat.dtype)).view(1)
    weight = torch.where(total == 0, total, total * 0 + 1)
    return pack(flat < 0 if round % 2 == 0 else flat <= 0, 1), weight


def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
    """Add ``weight`` times one worker's vote: 1 where the bit is not set, -1 where it is set."""
    negative, vote = unpack(parts[0], 1, into.numel()), parts[1]
    add_pieces(into, weight, lambda p: negative[p].to(vote.dtype).mul_(-2).add_(1).mul_(vote))
