"""Pack codes of a few bits: eight codes of one bit become one byte of the message.

Unpacked, each code is one byte. Packed, codes of 1, 2 or 4 bits stand side by side in a byte, the
first one lowest. Other widths are sums of these: 6 bits are all low 4 bits, then all high 2 bits.

Torch has no operation that packs. But a word of several unpacked codes, multiplied by a sum of
powers of two, has all codes in its highest byte. With two codes of 4 bits, a and b:

    word         0000bbbb 0000aaaa
    word << 8    0000aaaa 00000000
    word << 4    bbbb0000 aaaa0000
    the sum      bbbbaaaa ........

Words are little-endian.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from shoal.axes.compression.kit.blocks import pieces

WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16}  # by width: the codes of one packed byte
WIDEST = 8
CODES_AT_ONCE = 2**19  # smaller pieces would spend more time in calls than in work


def nbytes(count: int, width: int) -> int:
    """Return the bytes that ``count`` codes of ``width`` bits take."""
    return sum(-(-count * part_width // 8) for part_width in _part_widths(width))


def pack(codes: Tensor, width: int) -> Tensor:
    """Pack codes (n,), bytes below ``2 ** width``, into ``width`` bits each; (nbytes,) uint8."""
    raw = codes.view(torch.uint8)  # of bool and int8 too
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
            part[piece.start * part_width // 8 : -(-piece.stop * part_width // 8)] = _pack(
                code, part_width
            )
            shift += part_width
    return packed


def unpack(packed: Tensor, width: int, count: int) -> Tensor:
    """Return the ``count`` codes that were packed, a byte each; (count,) uint8."""
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
    """Return the widths of 4, 2 and 1 bits that add up to a width: its binary digits."""
    return (WIDEST,) if width == WIDEST else tuple(w for w in (4, 2, 1) if width & w)


def _pack(codes: Tensor, width: int) -> Tensor:
    """Pack codes of 1, 2 or 4 bits; each packed byte is returned in a word of its own."""
    codes_per_byte = 8 // width
    if padding := -codes.numel() % codes_per_byte:
        codes = torch.cat([codes, codes.new_zeros(padding)])
    words = (codes.clone() if codes.storage_offset() % codes_per_byte else codes).view(WORDS[width])
    top = 8 * (codes_per_byte - 1)
    # Code i stands at bit 8 i and belongs at bit top + width i. No two products overlap.
    shifts = sum(1 << (top - (8 - width) * i) for i in range(codes_per_byte))
    return (words * shifts) >> top


def _unpack(packed: Tensor, width: int) -> Tensor:
    table = _table(width, packed.device)
    return table.index_select(0, packed.to(torch.int32)).view(torch.uint8)


@functools.lru_cache(maxsize=16)
def _table(width: int, device: torch.device) -> Tensor:
    """Return for each packed byte its codes as one word."""
    shifts = torch.arange(0, 8, width, device=device)
    codes: Tensor = (torch.arange(256, device=device).unsqueeze(1) >> shifts) & (2**width - 1)
    return codes.to(torch.uint8).view(WORDS[width]).squeeze(1)
