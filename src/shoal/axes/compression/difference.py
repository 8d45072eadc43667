"""Send the difference between a value and its public copy, which every receiver has.

In gossip, workers send models, and a compressor that drops entries would damage the model. It may
drop entries of the difference between a model and its public copy: what was not sent is still part
of the difference in the next round, so the error shrinks from round to round.

References:
    Koloskova, Stich & Jaggi, `Decentralized stochastic optimization and gossip algorithms with
    compressed communication <https://arxiv.org/abs/1902.00340>`_, 2019, Algorithm 2 (CHOCO-SGD).
    Richtárik et al., `EF21 <https://arxiv.org/abs/2106.05203>`_, 2021 (this method for gradients).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from shoal.axes.compression.compressor import Compressor, Trait, Value, add_dense, check_inner
from shoal.errors import BadArgument, Conflict, ConflictError
from shoal.flow import Agreed, Ask, Dense, Flow, Gather, Mean, alone, drive, through
from shoal.notation import is_number, typed

SAMPLE_NUMEL = 4096  # length of the random vector with which the default of gamma is computed


def difference(inner: Compressor, gamma: float | None = None) -> Compressor:
    """Compress the difference to a public copy with ``inner``. What is lost is sent later.

    In gossip this is CHOCO-SGD: worker i adds gamma (sum_j w_ij x^_j - x^_i) to its model, where
    x^_j is the public copy of worker j. For gradients, averaged over all workers, it is EF21.

    Args:
        inner: a contractive compressor with a single ask, such as ``topk(0.1)``.
        gamma: step size of gossip, in (0, 1]. A compressor that loses more needs a lower one. The
            default is half of the share of a random vector's squared norm that ``inner`` sends.

    Example: ``difference(topk(0.25))``, ``difference(cast(bfloat16), 0.5)``.

    Differs from the paper: the exchange runs while the gradient is computed, so a model is mixed
    before the update of the step, not after it. Besides its own public copy, a worker keeps only
    the weighted sum of all copies that it mixes, as in the code of the authors.
    """
    check_inner(f"difference({inner})", inner, "difference(topk(0.1))")
    if gamma is not None and not (is_number(gamma) and 0 < gamma <= 1):
        raise BadArgument(f"difference({inner}, {gamma})", "gamma must be a number in (0, 1]")
    _refuse(inner)

    def init(value: Value) -> tuple[Any, Any, Any]:
        # The copies are at least float32, because in 16 bits a small change would be rounded away.
        copy_dtype = torch.promote_types(value.tensor.dtype, torch.float32)
        x_hat = torch.zeros_like(value.tensor, dtype=copy_dtype)
        return x_hat, torch.zeros_like(x_hat), inner.init(value)

    def flow(value: Value, state: tuple[Any, Any, Any], round: int) -> Flow:
        x_hat, s, inner_state = state  # x_hat: public copy; s: weighted sum of the workers' copies
        change = value.tensor - x_hat
        inner_flow = inner.flow(value.with_tensor(change), inner_state, round)
        mean, mine, inner_state = yield from _gather_narrow(inner_flow, change.dtype)
        x_hat, s = x_hat + mine.dense(), s + mean
        dtype = value.tensor.dtype
        return Agreed(s.to(dtype), Dense(x_hat.to(dtype)), (x_hat, s, inner_state))

    traits = (inner.traits & Trait.SLICEABLE) | Trait.TRACKS
    option = "" if gamma is None else f", {typed(gamma)}"
    name = f"difference({inner.name}{option})"
    step_size = gamma or _sent_energy_share(inner) / 2
    return Compressor(name, traits, flow, init, inner.add, gamma=step_size)


def _gather_narrow(flow: Flow, dtype: torch.dtype) -> Flow:
    """Run a flow, but replace each Mean in another dtype by a Gather that adds up in ``dtype``.

    Rounding in 16 bits would make s differ from the weighted sum of the public copies.
    """

    def answer(ask: Ask) -> Generator[Ask, Any, Any]:
        if isinstance(ask, Mean) and ask.tensor.dtype != dtype:
            ask = Gather((ask.tensor,), add_dense, torch.empty_like(ask.tensor, dtype=dtype))
        return (yield ask)

    return through(flow, answer)


def _sent_energy_share(inner: Compressor) -> float:
    """Estimate the paper's delta: the share of a vector's squared norm that ``inner`` sends."""
    x = torch.randn(SAMPLE_NUMEL, generator=torch.Generator().manual_seed(0))
    mine = drive(inner.flow(Value(x.clone()), inner.init(Value(x)), 0), alone).mine.dense()
    return float(1 - (x - mine).square().sum() / x.square().sum())


def _refuse(inner: Compressor) -> None:
    name, traits = inner.name, inner.traits
    if Trait.LOSSLESS in traits:
        why = f"nothing is lost with {name}, so a public copy is useless"
    elif traits & (Trait.CONSERVING | Trait.TRACKS):
        why = f"{name} sends later what it did not send, and so does the public copy"
    elif traits & (Trait.MERGES | Trait.MOMENTUM):
        why = f"the result of {name} is not the mean of what the workers sent"
    elif Trait.CONTRACTIVE not in traits:
        why = f"{name} is not contractive, so the public copy diverges"
    elif Trait.ONE_SHOT not in traits:
        why = f"the second message of {name} needs the first mean, which differs between neighbours"
    else:
        return
    needless = traits & (Trait.LOSSLESS | Trait.CONSERVING | Trait.TRACKS)
    instead = f"use {name} alone" if needless else "use difference(topk(0.1))"
    raise ConflictError([Conflict(f"difference x {inner.name}", why, instead)])
