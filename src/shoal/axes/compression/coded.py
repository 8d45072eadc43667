"""Entropy coding: levels that occur often take few bits.

References:
    Alistarh et al., `QSGD <https://arxiv.org/abs/1610.02132>`_, 2017, Section 3.2 (Elias coding).
    Gajjala et al., `Huffman coding based encoding techniques for fast distributed deep learning
    <https://doi.org/10.1145/3426745.3431334>`_, 2020.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit import bit_packing as bits
from shoal.axes.compression.kit import entropy as lengths
from shoal.axes.compression.kit import entropy as prefix
from shoal.axes.compression.kit.message_size import MARKS, agree
from shoal.errors import BadArgument, Conflict, ConflictError
from shoal.flow import Ask, Flow, Gather, through

CODES = {"elias": lengths.elias, "huffman": lengths.huffman}
KINDS = (torch.uint8, torch.int8, torch.int16, torch.int32)


def coded(inner: Compressor, code: str = "huffman") -> Compressor:
    """Send the codes of a quantiser in fewer bits, without loss.

    All workers first agree on the largest message, in 1 KB; then each sends as much. Tensors for
    which that does not pay travel as ``inner`` sends them.

    Args:
        inner: a compressor that sends whole numbers, such as ``qsgd(16)`` or ``terngrad``.
        code: ``huffman``, which is the shortest, or ``elias``, which needs no tree.

    Example: ``coded(qsgd(16), huffman)``, ``coded(terngrad, elias)``, ``coded(int8)``.

    Differs from the paper: Elias' gamma code is of the rank of each byte by frequency, for codes
    come packed, several a byte; and it has at most 16 bits.
    """
    _refuse(inner, code)

    def flow(value: Value, state: Any, round: int) -> Flow:
        return (yield from through(inner.flow(value, state, round), send))

    def send(ask: Ask) -> Generator[Ask, Any, Any]:
        if not isinstance(ask, Gather) or ask.parts[0].dtype not in KINDS:
            return (yield ask)
        text = _text(ask.parts[0], inner.width, ask.like.numel())
        most = worth(ask.parts[0].nbytes, text.numel())
        if most <= 0:
            return (yield ask)
        said = prefix.encode(text, CODES[code](lengths.counts(text)))
        bound = yield from agree(said.stream.numel(), most, text)
        if bound is None:
            return (yield ask)
        stream = said.stream.new_zeros(bound)
        stream[: said.stream.numel()] = said.stream
        told = torch.tensor([text.numel(), KINDS.index(ask.parts[0].dtype)], device=text.device)
        parts = (told, said.lengths, said.spans, stream, *ask.parts[1:])
        return (yield Gather(parts, add, ask.like))

    def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
        if inner.add is None:
            raise BadArgument(name, f"{inner} sends nothing that is added up elsewhere")
        if parts[0].dtype == torch.int64:  # coded; else it did not pay
            count, kind = parts[0].tolist()
            text = prefix.decode(prefix.Coded(*parts[1:4]), count)
            codes = _codes(text, inner.width, into.numel()).view(KINDS[kind])
            parts = (codes, *parts[4:])
        inner.add(parts, into, weight)

    name = f"coded({inner.name}, {code})"
    return Compressor(name, inner.traits & ~Trait.ONE_SHOT, flow, inner.init, add)


def worth(raw: int, count: int) -> int:
    """Bytes that the codewords of a text may take, if all that goes with them is to pay."""
    return raw - 256 - 2 * -(-count // prefix.CHUNK) - 4 * MARKS - 4 * 16


def _refuse(inner: Compressor, code: str) -> None:
    if not isinstance(inner, Compressor) or code not in CODES:
        raise BadArgument(
            f"coded({inner}, {code})",
            f"it wraps a quantiser, with one of {', '.join(CODES)}: coded(qsgd(16), elias)",
        )
    if Trait.SUMS in inner.traits:
        why = "sums travel as numbers, and there are no codes in them"
        raise ConflictError([Conflict(f"coded x {inner.name}", why, inner.name)])


def _text(codes: Tensor, width: int, count: int) -> Tensor:
    """Bytes in which what occurs often shows: codes that packing tore apart are put together."""
    raw = codes.contiguous().view(-1).view(torch.uint8)
    if width in (1, 2, 4, 8):
        return raw
    whole = bits.unpack(raw, width, count)
    return bits.pack(whole, 4) if width == 3 else whole  # two of three bits fit into one byte


def _codes(text: Tensor, width: int, count: int) -> Tensor:
    """Packed as the quantiser did."""
    if width in (1, 2, 4, 8):
        return text
    return bits.pack(bits.unpack(text, 4, count) if width == 3 else text, width)
