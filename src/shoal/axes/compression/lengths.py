"""How many bits each byte gets: codes for bytes that occur more often and less often.

References:
    Huffman, `A method for the construction of minimum-redundancy codes
    <https://doi.org/10.1109/JRPROC.1952.273898>`_, 1952.
    Elias, `Universal codeword sets <https://doi.org/10.1109/TIT.1975.1055349>`_, 1975.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from shoal.axes.compression.prefix import LONGEST


def counts(text: Tensor) -> Tensor:
    """How often each byte occurs; (256,)."""
    return torch.bincount(text, minlength=256)


def huffman(often: Tensor) -> Tensor:
    """Lengths of the shortest code for bytes that occur so often; none over ``LONGEST``."""
    left = {byte: count for byte, count in enumerate(often.tolist()) if count}
    while True:
        bits = _depths(left)
        if max(bits.values(), default=0) <= LONGEST:
            break
        left = {byte: (count + 1) // 2 for byte, count in left.items()}  # flatter, so not as deep
    return _lengths(bits, often)


def elias(often: Tensor) -> Tensor:
    """Lengths of Elias' gamma code of each byte's rank: 1 bit for the most frequent, then 3, 5."""
    found = often.tolist()
    ranked = sorted((b for b in range(256) if found[b]), key=lambda b: (-found[b], b))
    bits = {byte: 2 * rank.bit_length() - 1 for rank, byte in enumerate(ranked, start=1)}
    return _lengths({byte: min(n, LONGEST) for byte, n in bits.items()}, often)


def _depths(left: dict[int, int]) -> dict[int, int]:
    """How deep each byte lies in Huffman's tree; deterministic where counts are equal."""
    if len(left) == 1:
        return dict.fromkeys(left, 1)
    depths = dict.fromkeys(left, 0)
    heap: list[tuple[int, int, tuple[int, ...]]] = [(n, byte, (byte,)) for byte, n in left.items()]
    heapq.heapify(heap)
    while len(heap) > 1:
        (one, byte, few), (other, _, more) = heapq.heappop(heap), heapq.heappop(heap)
        for each in (*few, *more):
            depths[each] += 1
        heapq.heappush(heap, (one + other, byte, (*few, *more)))
    return depths


def _lengths(bits: dict[int, int], like: Tensor) -> Tensor:
    return torch.tensor([bits.get(b, 0) for b in range(256)], dtype=torch.uint8, device=like.device)
