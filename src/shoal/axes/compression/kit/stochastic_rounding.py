"""Random numbers for stochastic rounding: different on every worker, and reproducible.

Averaging over workers reduces the error of unbiased compressors only if workers round
independently, but a flow does not know its rank. So the seed is made of the parameter's name, the
round and a sample of the content. Workers hold different gradients, so they draw different numbers;
and the same value in the same round is rounded the same way, also after a restart.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

SAMPLE = 1024
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def generator(name: str, flat: Tensor, round: int) -> torch.Generator:
    """Return a generator whose seed depends on name, round and content only."""
    sample = flat[:: max(1, flat.numel() // SAMPLE)].contiguous()
    content = int(sample.view(INTEGERS[sample.element_size()]).sum(dtype=torch.int64))
    seed = zlib.crc32(f"{name} {round} {content}".encode())
    return torch.Generator(flat.device).manual_seed(seed)


def integers(count: int, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Return random integers over the whole range of ``dtype``; drawn as 64-bit words for speed."""
    words = torch.empty(-(-count * dtype.itemsize // 8), dtype=torch.int64, device=rng.device)
    return words.random_(-(2**63), None, generator=rng).view(dtype)[:count]


def rounded(y: Tensor, levels: int, rng: torch.Generator) -> Tensor:
    """Round numbers in [-levels, levels] up or down at random, with the right expectation.

    Returns codes 0 to ``2 * levels`` as uint8; ``levels`` is at most 127. Computes
    ``floor(y + levels + u)`` with u uniform in [0, 1). Sixteen bits of u are drawn for each number;
    the lower bits that single precision still holds are drawn once for the piece. All bits of u are
    exact in the sum, so zero and every other integer stay as they are.
    """
    beyond = 8 - (2 * levels).bit_length()  # of 24 bits: 16 for u, the integer part takes some
    shared = torch.randint(1 << beyond, (1,), generator=rng, device=y.device)
    u = integers(y.numel(), torch.int16, rng).view(y.shape).to(torch.float32)
    u.mul_(2.0**-16).add_(shared * 2.0 ** -(16 + beyond) + (levels + 0.5))
    return u.add_(y.to(torch.float32)).clamp_(0, 2 * levels).to(torch.uint8)
