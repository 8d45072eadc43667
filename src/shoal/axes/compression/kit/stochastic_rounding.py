"""Chance for stochastic rounding: fresh for every worker, round and parameter, and repeatable.

Unbiased compressors gain from many workers only if these do not all err alike, but a flow does not
know its worker's number. So the generator's seed is the parameter's name, the round, and the
content itself, of which a sample is taken. Workers hold different gradients, so they draw
differently; and the same value in the same round is rounded the same way, after a restart too.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

SAMPLE = 1024
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def generator(name: str, flat: Tensor, round: int) -> torch.Generator:
    """A generator that name, round and content decide."""
    some = flat[:: max(1, flat.numel() // SAMPLE)].contiguous()
    content = int(some.view(INTEGERS[some.element_size()]).sum(dtype=torch.int64))
    seed = zlib.crc32(f"{name} {round} {content}".encode())
    return torch.Generator(flat.device).manual_seed(seed)


def integers(count: int, dtype: torch.dtype, chance: torch.Generator) -> Tensor:
    """Random bits, as so many integers of the type's whole range; drawn by words, which is fast."""
    words = torch.empty(-(-count * dtype.itemsize // 8), dtype=torch.int64, device=chance.device)
    return words.random_(-(2**63), None, generator=chance).view(dtype)[:count]


def rounded(y: Tensor, levels: int, chance: torch.Generator) -> Tensor:
    """Numbers in -levels .. levels to one of the two next to each, right on average.

    Comes out as codes 0 .. 2 * levels, of uint8; levels is at most 127. Computes
    floor(y + levels + u) with u uniform in [0, 1): sixteen bits of u are each number's own, and
    what bits single precision holds beyond these are the piece's. All of u is exact in the sum,
    so zero stays zero, and so does any whole number.
    """
    beyond = 8 - (2 * levels).bit_length()  # 24 bits are held; the whole part takes some
    shared = torch.randint(1 << beyond, (1,), generator=chance, device=y.device)
    u = integers(y.numel(), torch.int16, chance).view(y.shape).to(torch.float32)
    u.mul_(2.0**-16).add_(shared * 2.0 ** -(16 + beyond) + (levels + 0.5))
    return u.add_(y.to(torch.float32)).clamp_(0, 2 * levels).to(torch.uint8)
