"""Entropy coding: encode frequent bytes in few bits, and rare bytes in more.

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
from shoal.axes.compression.kit import entropy
from shoal.axes.compression.kit.bit_packing import pack, unpack
from shoal.axes.compression.kit.message_size import MARKS, agree
from shoal.errors import BadArgument, Conflict, ConflictError
from shoal.flow import Ask, Flow, Gather, through

CODES = {"elias": entropy.elias, "huffman": entropy.huffman}
KINDS = (torch.uint8, torch.int8, torch.int16, torch.int32)


def coded(inner: Compressor, code: str = "huffman") -> Compressor:
    """Encode the integer codes of ``inner`` in fewer bits, by an entropy code, without loss.

    The workers first agree on a size that every worker's message fits, by an extra ask of about
    1 KB. Then each worker pads its message to that size. If a message would not become smaller on
    one of the workers, all workers send the tensor as ``inner`` encodes it.

    Args:
        inner: a compressor that sends integer codes, such as ``qsgd(16)`` or ``terngrad``.
        code: ``huffman``, which gives the shortest messages, or ``elias``, which builds no tree.

    Example: ``coded(qsgd(16), huffman)``, ``coded(terngrad, elias)``, ``coded(int8)``.

    Differs from the paper: the Elias gamma code is applied to whole bytes, numbered from the most
    frequent one, because ``inner`` packs several codes into a byte. A codeword has at most 16 bits.
    """
    _refuse(inner, code)

    def flow(value: Value, state: Any, round: int) -> Flow:
        return (yield from through(inner.flow(value, state, round), send))

    def send(ask: Ask) -> Generator[Ask, Any, Any]:
        if not isinstance(ask, Gather) or ask.parts[0].dtype not in KINDS:
            return (yield ask)
        text = _text(ask.parts[0], inner.width, ask.like.numel())
        most = max_stream_nbytes(ask.parts[0].nbytes, text.numel())
        if most <= 0:
            return (yield ask)
        encoded = entropy.encode(text, CODES[code](entropy.counts(text)))
        bound = yield from agree(encoded.stream.numel(), most, text)
        if bound is None:
            return (yield ask)
        stream = encoded.stream.new_zeros(bound)
        stream[: encoded.stream.numel()] = encoded.stream
        header = torch.tensor([text.numel(), KINDS.index(ask.parts[0].dtype)], device=text.device)
        parts = (header, encoded.lengths, encoded.spans, stream, *ask.parts[1:])
        return (yield Gather(parts, add, ask.like))

    def add(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
        if inner.add is None:
            raise BadArgument(name, f"{inner} has no add() to decode its messages with")
        if parts[0].dtype == torch.int64:  # entropy-coded; otherwise ``inner`` encoded the message
            count, kind = parts[0].tolist()
            text = entropy.decode(entropy.Coded(*parts[1:4]), count)
            codes = _codes(text, inner.width, into.numel()).view(KINDS[kind])
            parts = (codes, *parts[4:])
        inner.add(parts, into, weight)

    name = f"coded({inner.name}, {code})"
    return Compressor(name, inner.traits & ~Trait.ONE_SHOT, flow, inner.init, add)


def max_stream_nbytes(raw: int, count: int) -> int:
    """Return how many bytes of codewords, for ``count`` bytes of text, are worth sending.

    It is ``raw``, the bytes that ``inner`` would send, minus all other parts of a coded message.
    """
    return raw - 256 - 2 * -(-count // entropy.CHUNK) - 4 * MARKS - 4 * 16


def _refuse(inner: Compressor, code: str) -> None:
    if not isinstance(inner, Compressor) or code not in CODES:
        why = f"inner must be a compressor such as qsgd(16), and code one of {', '.join(CODES)}"
        raise BadArgument(f"coded({inner}, {code})", why)
    if Trait.SUMS in inner.traits:
        why = f"{inner.name} sends floating-point numbers, and these are no codes"
        raise ConflictError([Conflict(f"coded x {inner.name}", why, f"use {inner.name} alone")])


def _text(codes: Tensor, width: int, count: int) -> Tensor:
    """Return the bytes to encode. Codes that are split over several bytes are unpacked first."""
    raw = codes.contiguous().view(-1).view(torch.uint8)
    if width in (1, 2, 4, 8):
        return raw
    whole = unpack(raw, width, count)
    return pack(whole, 4) if width == 3 else whole  # a byte holds two codes of three bits


def _codes(text: Tensor, width: int, count: int) -> Tensor:
    """Undo :func:`_text`: return the codes as ``inner`` packed them."""
    if width in (1, 2, 4, 8):
        return text
    return pack(unpack(text, 4, count) if width == 3 else text, width)
