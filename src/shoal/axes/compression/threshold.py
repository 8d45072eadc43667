"""Threshold sparsification: what has grown beyond tau is sent as plus or minus tau.

References:
    Strom, `Scalable distributed DNN training using commodity GPU cloud computing
    <https://www.isca-archive.org/interspeech_2015/strom15_interspeech.html>`_, 2015.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value, gathered
from shoal.axes.compression.kit.residual import plus, zeros
from shoal.axes.compression.kit.select import largest
from shoal.axes.compression.kit.sparse import Parts, add_at, check_ratio, decode, encode, share
from shoal.errors import BadArgument
from shoal.flow import Agreed, Flow
from shoal.notation import is_number, typed


def threshold(tau: float, ratio: float = 0.01) -> Compressor:
    """Add gradients up; send plus or minus tau of entries whose sum has grown beyond it.

    It keeps its residual itself.

    Args:
        tau: what an entry must reach to be sent, and what is sent of it.
        ratio: room in a message, as a share of the entries; the largest sums go first.

    Example: ``threshold(0.05, 0.5)``.

    Differs from the paper: there a message is as long as needed. Here all workers' messages have
    room for as many entries, so that none must be told their number; what finds no room waits in
    the residual, and room that is not needed says zero. An entry takes 2 bits and its place.
    """
    if not (is_number(tau) and 0 < tau < math.inf):
        raise BadArgument(f"threshold({tau})", "tau must be positive, for example threshold(0.001)")
    check_ratio(f"threshold({typed(tau)}, ratio)", ratio)

    def add(parts: Parts, into: Tensor, weight: float) -> None:
        code, packed = parts
        k = share(ratio, into.numel())
        signs = unpack_signs(packed, k).to(into.dtype)
        add_at(decode(code, k, into.numel()), signs * tau, into, weight)

    def init(value: Value) -> tuple[Tensor]:
        return (zeros(value.tensor),)

    def flow(value: Value, state: tuple[Tensor], round: int) -> Flow:
        wanted, row = plus(value.tensor, state[0])
        where = largest(row, share(ratio, row.numel()))
        sums = row[where]
        signs = torch.where(sums.abs() >= tau, sums.sign(), torch.zeros_like(sums))
        parts = (encode(where, row.numel()), pack_signs(signs))
        mean, mine = yield from gathered(value, parts, add)
        row.index_add_(0, where, signs * tau, alpha=-1)
        return Agreed(mean, mine, (wanted,))

    told = "" if ratio == 0.01 else f", {typed(ratio)}"
    traits = Trait.CONSERVING | Trait.SLICEABLE | Trait.ONE_SHOT
    return Compressor(f"threshold({typed(tau)}{told})", traits, flow, init, add)


def pack_signs(signs: Tensor) -> Tensor:
    """-1, 0 or 1 in 2 bits each, four to a byte."""
    codes = torch.nn.functional.pad((signs + 1).to(torch.uint8), (0, -signs.numel() % 4))
    a, b, c, d = codes.view(-1, 4).unbind(1)
    return a | b << 2 | c << 4 | d << 6


def unpack_signs(packed: Tensor, k: int) -> Tensor:
    """The k signs that were packed."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device)
    codes = packed.unsqueeze(1) >> shifts & 3  # (bytes, 4)
    return codes.view(-1)[:k].to(torch.int8) - 1
