"""Pack codes of a few bits into bytes, for example eight codes of one bit into one byte.

An unpacked code is one byte. A packed byte holds 8, 4 or 2 codes of 1, 2 or 4 bits, the first code
in its lowest bits. Codes of 8 bits stay as they are. Other widths are split. For codes of 6 bits, a
message first holds the low 4 bits of all codes, then the high 2 bits of all codes.

Torch has no operation that packs. But if several unpacked codes are viewed as one integer (a word)
and multiplied by a sum of powers of two, the highest byte of the product is the packed byte. With
two codes of 4 bits, a and b:

    word         0000bbbb 0000aaaa
    word << 8    0000aaaa 00000000
    word << 4    bbbb0000 aaaa0000
    the sum      bbbbaaaa ........

The first code is the lowest byte of a word (little-endian).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from shoal.axes.compression.kit.blocks import pieces

WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16}  # width -> type of a word
WIDEST = 8
CODES_AT_ONCE = 2**19  # with fewer, the overhead of the calls would dominate


def nbytes(count: int, width: int) -> int:
    """Return the number of bytes of ``count`` packed codes of ``width`` bits."""
    return sum(-(-count * part_width // 8) for part_width in _part_widths(width))


def pack(codes: Tensor, width: int) -> Tensor:
    """Return packed codes, (nbytes,) uint8. ``codes`` are n bytes, each below ``2 ** width``."""
    raw = codes.view(torch.uint8)  # codes may be uint8, int8 or bool
    if width == WIDEST:
        return raw
    sizes = [nbytes(raw.numel(), part_width) for part_width in _part_widths(width)]
    packed = raw.new_empty(sum(sizes))
    parts = packed.split_with_sizes(sizes)
    for piece in pieces(raw.numel(), size=CODES_AT_ONCE):
        shift = 0
        for part_width, part in zip(_part_widths(width), parts, strict=True):
            code = raw[piece] >> shift if shift else raw[piece]
            if shift + part_width < width:
                code = code & (2**part_width - 1)
            start, stop = piece.start * part_width // 8, -(-piece.stop * part_width // 8)
            part[start:stop] = _pack(code, part_width)
            shift += part_width
    return packed


def unpack(packed: Tensor, width: int, count: int) -> Tensor:
    """Return the ``count`` codes that were packed, one byte each: (count,) uint8."""
    if width in (1, 2, 4):
        return _unpack(packed, width)[:count]
    if width == WIDEST:
        return packed
    codes = packed.new_zeros(count)
    start = shift = 0
    for part_width in _part_widths(width):
        stop = start + nbytes(count, part_width)
        codes |= _unpack(packed[start:stop], part_width)[:count] << shift
        start, shift = stop, shift + part_width
    return codes


def _part_widths(width: int) -> tuple[int, ...]:
    """Return the widths into which a code is split: of 4, 2 and 1, those that add up to it."""
    return (WIDEST,) if width == WIDEST else tuple(w for w in (4, 2, 1) if width & w)


def _pack(codes: Tensor, width: int) -> Tensor:
    """Pack codes of 1, 2 or 4 bits. Return words, whose lowest bytes are the packed bytes."""
    codes_per_byte = 8 // width
    if padding := -codes.numel() % codes_per_byte:
        codes = torch.cat([codes, codes.new_zeros(padding)])
    words = (codes.clone() if codes.storage_offset() % codes_per_byte else codes).view(WORDS[width])
    top = 8 * (codes_per_byte - 1)
    # Code i is at bit 8 i and must move to bit top + width i. No two shifted codes overlap.
    shifts = sum(1 << (top - (8 - width) * i) for i in range(codes_per_byte))
    return (words * shifts) >> top


def _unpack(packed: Tensor, width: int) -> Tensor:
    table = _table(width, packed.device)
    return table.index_select(0, packed.to(torch.int32)).view(torch.uint8)


@functools.lru_cache(maxsize=16)
def _table(width: int, device: torch.device) -> Tensor:
    """Return a table that maps a packed byte to the word of its unpacked codes: (256,)."""
    shifts = torch.arange(0, 8, width, device=device)
    codes: Tensor = (torch.arange(256, device=device).unsqueeze(1) >> shifts) & (2**width - 1)
    return codes.to(torch.uint8).view(WORDS[width]).squeeze(1)
