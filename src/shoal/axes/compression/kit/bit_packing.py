"""Codes of a few bits, really packed: eight codes of one bit are one byte on the wire.

A code starts and ends as a byte of its own, which is what torch computes with. Between, codes of
1, 2 or 4 bits stand side by side in a byte, the first one lowest; other widths are put together
from these (6 bits: all low fours, then all high twos). Torch has no operation that packs, but one
multiplication of a word of several codes by a sum of powers of two shifts each to its own place:
so that a pass over the codes is a pass over words. Words are taken as little-endian.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from shoal.axes.compression.kit.blocks import pieces

WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16}  # by width: as many codes as fill a byte
WIDEST = 8
CODES_AT_ONCE = 2**19  # in many small pieces the calls cost more than the work


def nbytes(count: int, width: int) -> int:
    """Bytes that so many codes of so many bits take."""
    return sum(-(-count * single // 8) for single in _singles(width))


def pack(codes: Tensor, width: int) -> Tensor:
    """Put codes (n,), bytes below ``2 ** width``, into ``width`` bits each; (nbytes,) uint8."""
    raw = codes.view(torch.uint8)  # of bool and int8 too
    if width == WIDEST:
        return raw
    sizes = [nbytes(raw.numel(), single) for single in _singles(width)]
    packed = raw.new_empty(sum(sizes))
    parts = packed.split_with_sizes(sizes)
    for piece in pieces(raw.numel(), size=CODES_AT_ONCE):
        done = 0
        for single, part in zip(_singles(width), parts, strict=True):
            code = raw[piece] >> done if done else raw[piece]
            if done + single < width:
                code = code & (2**single - 1)
            part[piece.start * single // 8 : -(-piece.stop * single // 8)] = _pack(code, single)
            done += single
    return packed


def unpack(packed: Tensor, width: int, count: int) -> Tensor:
    """The ``count`` codes that were packed, a byte each; (count,) uint8."""
    if width in (1, 2, 4):
        return _unpack(packed, width)[:count]
    if width == WIDEST:
        return packed
    codes = packed.new_zeros(count)
    start = done = 0
    for single in _singles(width):
        stop = start + nbytes(count, single)
        codes |= _unpack(packed[start:stop], single)[:count] << done
        start, done = stop, done + single
    return codes


def _singles(width: int) -> tuple[int, ...]:
    """Widths of 4, 2 and 1 that make up another: the binary digits of it."""
    return (WIDEST,) if width == WIDEST else tuple(w for w in (4, 2, 1) if width & w)


def _pack(codes: Tensor, width: int) -> Tensor:
    """Packed, each byte in a word of its own."""
    each = 8 // width
    if gap := -codes.numel() % each:
        codes = torch.cat([codes, codes.new_zeros(gap)])
    words = (codes.clone() if codes.storage_offset() % each else codes).view(WORDS[width])
    top = 8 * (each - 1)
    # Code i stands at bit 8 i and is wanted at bit top + width i. No two products overlap.
    shifts = sum(1 << (top - (8 - width) * i) for i in range(each))
    return (words * shifts) >> top


def _unpack(packed: Tensor, width: int) -> Tensor:
    table = _table(width, packed.device)
    return table.index_select(0, packed.to(torch.int32)).view(torch.uint8)


@functools.lru_cache(maxsize=16)
def _table(width: int, device: torch.device) -> Tensor:
    """For each byte, its codes as one word."""
    shifts = torch.arange(0, 8, width, device=device)
    codes: Tensor = (torch.arange(256, device=device).unsqueeze(1) >> shifts) & (2**width - 1)
    return codes.to(torch.uint8).view(WORDS[width]).squeeze(1)
