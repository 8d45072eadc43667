"""Prefix codes for bytes: frequent bytes get short codewords.

The codes are canonical: codewords are assigned in the order of their length, then of their byte. So
the 256 lengths (0 for a byte that does not occur) define the code. No Python loop runs over the
text, which is the tensor of bytes to encode. Encoding adds up shifted codewords. For decoding, the
text is divided into chunks, whose lengths in bits are sent, too. One step decodes one byte of every
chunk.

References:
    Huffman, `A method for the construction of minimum-redundancy codes
    <https://doi.org/10.1109/JRPROC.1952.273898>`_, 1952.
    Elias, `Universal codeword sets <https://doi.org/10.1109/TIT.1975.1055349>`_, 1975.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 512  # bytes of text per chunk; decoding takes this many steps
LONGEST = 16  # most bits of a codeword; wherever it starts in a byte, it ends within three bytes


class Coded(NamedTuple):
    """A text encoded in a prefix code."""

    lengths: Tensor  # (256,) uint8: bits of each byte's codeword
    spans: Tensor  # (chunks,) int16: bits of each chunk
    stream: Tensor  # (nbytes,) uint8: all codewords; the first bit is the highest bit of a byte


def encode(text: Tensor, lengths: Tensor) -> Coded:
    """Encode a text (n,) in the code that these codeword lengths define."""
    bit_lengths = lengths.to(torch.int32)
    index = text.to(torch.int32)
    bits = bit_lengths.index_select(0, index)  # (n,)
    ends = bits.cumsum(0)  # int64
    starts = ends - bits
    total = int(ends[-1]) if len(text) else 0
    words = _words(lengths).index_select(0, index)
    words <<= 24 - (starts & 7).to(torch.int32) - bits  # move each to its place in three bytes
    first = starts >> 3
    stream = torch.zeros(-(-total // 8) + 2, dtype=torch.int32, device=text.device)
    for place, shift in enumerate((16, 8, 0)):  # codewords do not overlap, so adding is OR
        stream.index_add_(0, first + place, (words >> shift) & 255)
    last = ends[CHUNK - 1 :: CHUNK]
    last = torch.cat([last, ends[-1:]]) if len(text) % CHUNK else last
    spans = last.diff(prepend=last.new_zeros(1)).to(torch.int16)
    return Coded(lengths, spans, stream[: -(-total // 8)].to(torch.uint8))


def decode(coded: Coded, count: int) -> Tensor:
    """Return the ``count`` bytes of the text. Padding at the end of the stream is ignored."""
    lengths, spans, stream = coded
    if count == 0:
        return stream.new_zeros(0)
    order, starts, width = _book(lengths)
    prefixes = torch.arange(2**width, device=stream.device, dtype=starts.dtype)
    symbols = order[torch.searchsorted(starts, prefixes, right=True) - 1]
    table = symbols.to(torch.int32) | (lengths[symbols].to(torch.int32) << 8)  # (2 ** width,)
    padded = torch.cat([stream, stream.new_zeros(3)]).to(torch.int32)
    # windows[i] are the 24 bits that begin at byte i
    windows = (padded[:-2] << 16) | (padded[1:-1] << 8) | padded[2:]
    position = spans.to(torch.int64).cumsum(0) - spans  # (chunks,): next bit to read in each chunk
    text = torch.empty(min(CHUNK, count), len(spans), dtype=torch.uint8, device=stream.device)
    for row in text:
        prefix = windows.index_select(0, (position >> 3).clamp_(max=len(windows) - 1))
        prefix >>= 24 - width - (position & 7).to(torch.int32)
        entry = table.index_select(0, prefix & (2**width - 1))
        row.copy_(entry & 255)
        position += entry >> 8
    return text.T.reshape(-1)[:count]


def _book(lengths: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the bytes in the order of their codewords, the codewords, and their width.

    Codewords are filled up with zeros to ``width`` bits, the length of the longest one.
    """
    width = int(lengths.max())
    order = torch.argsort(lengths, stable=True)
    order = order[lengths[order] > 0]
    sizes = 1 << (width - lengths[order].to(torch.int64))
    return order, sizes.cumsum(0) - sizes, width


def _words(lengths: Tensor) -> Tensor:
    """Return each byte's codeword, (256,) int32."""
    order, starts, width = _book(lengths)
    words = torch.zeros(256, dtype=torch.int32, device=lengths.device)
    words[order] = (starts >> (width - lengths[order].to(torch.int64))).to(torch.int32)
    return words


def counts(text: Tensor) -> Tensor:
    """Return how often each byte occurs, as a tensor (256,)."""
    return torch.bincount(text, minlength=256)


def huffman(byte_counts: Tensor) -> Tensor:
    """Return the codeword lengths of a Huffman code for these counts, at most ``LONGEST``."""
    frequency = {byte: count for byte, count in enumerate(byte_counts.tolist()) if count}
    while True:
        bits = _depths(frequency)
        if max(bits.values(), default=0) <= LONGEST:
            break
        frequency = {b: (n + 1) // 2 for b, n in frequency.items()}  # makes the tree less deep
    return _lengths(bits, byte_counts)


def elias(byte_counts: Tensor) -> Tensor:
    """Return Elias' gamma codeword lengths. From the most frequent byte on: 1, 3, 3, 5, ... 16."""
    frequency = byte_counts.tolist()
    ranked = sorted((b for b in range(256) if frequency[b]), key=lambda b: (-frequency[b], b))
    bits = {byte: 2 * rank.bit_length() - 1 for rank, byte in enumerate(ranked, start=1)}
    return _lengths({byte: min(n, LONGEST) for byte, n in bits.items()}, byte_counts)


def _depths(frequency: dict[int, int]) -> dict[int, int]:
    """Return each byte's depth in a Huffman tree. Of equal counts, the lowest byte comes first."""
    if len(frequency) == 1:
        return dict.fromkeys(frequency, 1)
    depths = dict.fromkeys(frequency, 0)
    heap: list[tuple[int, int, tuple[int, ...]]]
    heap = [(count, byte, (byte,)) for byte, count in frequency.items()]
    heapq.heapify(heap)
    while len(heap) > 1:
        (one, byte, few), (other, _, more) = heapq.heappop(heap), heapq.heappop(heap)
        for each in (*few, *more):
            depths[each] += 1
        heapq.heappush(heap, (one + other, byte, (*few, *more)))
    return depths


def _lengths(bits: dict[int, int], like: Tensor) -> Tensor:
    return torch.tensor([bits.get(b, 0) for b in range(256)], dtype=torch.uint8, device=like.device)
