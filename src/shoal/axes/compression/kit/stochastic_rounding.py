"""Random numbers for stochastic rounding: different on every worker, and reproducible.

The mean over workers has a smaller error only if the workers round independently, but a flow does
not know its rank. So the seed is a hash of the parameter's name, the round and a sample of the
tensor. Workers have different gradients, so they draw different numbers. The same tensor in the
same round is rounded in the same way, also after a restart.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

SAMPLE = 1024
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def generator(name: str, flat: Tensor, round: int) -> torch.Generator:
    """Return a generator whose seed depends only on the name, the round and the numbers."""
    sample = flat[:: max(1, flat.numel() // SAMPLE)].contiguous()
    content = int(sample.view(INTEGERS[sample.element_size()]).sum(dtype=torch.int64))
    seed = zlib.crc32(f"{name} {round} {content}".encode())
    return torch.Generator(flat.device).manual_seed(seed)


def integers(count: int, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Return ``count`` random integers over the whole range of ``dtype``."""
    words = torch.empty(-(-count * dtype.itemsize // 8), dtype=torch.int64, device=rng.device)
    return words.random_(-(2**63), None, generator=rng).view(dtype)[:count]


def rounded(y: Tensor, levels: int, rng: torch.Generator) -> Tensor:
    """Round numbers in [-levels, levels] up or down at random, so that their expectation is kept.

    Returns codes from 0 to ``2 * levels``, as uint8, where ``levels`` is at most 127. A code is
    ``floor(y + levels + u)`` with u uniform in [0, 1). The upper 16 bits of u are drawn for each
    number. The lower bits of u, as many as float32 has left, are drawn once for all numbers. The
    sum is exact in float32 if y is an integer, so integers are never changed.
    """
    low_bits = 8 - (2 * levels).bit_length()  # float32 has 24 bits: integer part, 16 of u, the rest
    shared = torch.randint(1 << low_bits, (1,), generator=rng, device=y.device)
    u = integers(y.numel(), torch.int16, rng).view(y.shape).to(torch.float32)
    u.mul_(2.0**-16).add_(shared * 2.0 ** -(16 + low_bits) + (levels + 0.5))
    return u.add_(y.to(torch.float32)).clamp_(0, 2 * levels).to(torch.uint8)
