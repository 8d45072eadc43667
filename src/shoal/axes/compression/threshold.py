"""Threshold sparsification: send tau or -tau for an entry when its residual has reached tau.

References:
    Strom, `Scalable distributed DNN training using commodity GPU cloud computing
    <https://www.isca-archive.org/interspeech_2015/strom15_interspeech.html>`_, 2015.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit import sparse
from shoal.axes.compression.kit.bit_packing import pack, unpack
from shoal.axes.compression.kit.residual import add_residual, one_residual
from shoal.axes.compression.kit.select import top_k
from shoal.errors import BadArgument
from shoal.flow import Agreed, Flow, Gather
from shoal.notation import is_number, typed


def threshold(tau: float, ratio: float = 0.01) -> Compressor:
    """Send tau or -tau for entries whose residual has reached tau. The rest is sent later.

    It keeps a residual, the sum of what was not sent, so it needs no ``error_feedback``.

    Args:
        tau: an entry is sent, as tau or -tau, when the magnitude of its residual is >= tau.
        ratio: entries in a message, as a share of all entries. The largest residuals are sent.

    Example: ``threshold(0.05, 0.5)``.

    Differs from the paper: its messages are as long as needed. Here the messages of all workers
    have the same number of entries, so that no size must be sent. Entries beyond this number wait
    in the residual. If fewer entries have reached tau, the others are sent as zeros. An entry takes
    2 bits and its index.
    """
    if not (is_number(tau) and 0 < tau < math.inf):
        raise BadArgument(f"threshold({tau})", "tau must be positive, for example threshold(0.001)")
    sparse.check_ratio("threshold", ratio, before=f"{typed(tau)}, ")

    def add(parts: sparse.Parts, into: Tensor, weight: float) -> None:
        k = sparse.share(ratio, into.numel())
        signs = unpack(parts[1], 2, k).to(into.dtype) - 1
        sparse.add_at(sparse.decode(parts[0], k, into.numel()), signs * tau, into, weight)

    def flow(value: Value, state: tuple[Tensor], round: int) -> Flow:
        v = add_residual(value.tensor, state[0])
        where, sums = top_k(v.view(-1), sparse.share(ratio, v.numel()))
        signs = torch.where(sums.abs() >= tau, sums.sign(), torch.zeros_like(sums))
        codes = pack((signs + 1).to(torch.uint8), 2)
        mean = yield Gather((sparse.encode(where, v.numel()), codes), add, like=value.tensor)
        amounts = signs * tau
        v.view(-1).index_add_(0, where, amounts, alpha=-1)
        return Agreed(mean, sparse.SparseSent(where, amounts, value.tensor), (v,))

    option = "" if ratio == 0.01 else f", {typed(ratio)}"
    traits = Trait.CONSERVING | Trait.SLICEABLE | Trait.ONE_SHOT
    return Compressor(f"threshold({typed(tau)}{option})", traits, flow, one_residual, add)
