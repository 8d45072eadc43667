"""What changed since my last word: everybody keeps a public copy of me, and errors die out.

Among neighbours models travel, and a model that loses entries is damaged; the difference between it
and its public copy may lose them, for what was not sent is still a difference in the next round.

References:
    Koloskova, Stich & Jaggi, `Decentralized stochastic optimization and gossip algorithms with
    compressed communication <https://arxiv.org/abs/1902.00340>`_, 2019, Algorithm 2 (CHOCO-SGD).
    Richtárik et al., `EF21 <https://arxiv.org/abs/2106.05203>`_, 2021 (the same for gradients).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from shoal.axes.compression.compressor import Compressor, Trait, Value, add_dense
from shoal.errors import BadArgument, Conflict, ConflictError
from shoal.flow import Agreed, Ask, Flow, Gather, Mean, alone, drive, through
from shoal.notation import is_number, typed

NUMBERS = 4096  # from which the default of gamma is found


def difference(inner: Compressor, gamma: float | None = None) -> Compressor:
    """Send what ``inner`` makes of the difference to my public copy.

    With gossip this is CHOCO-SGD, and a model moves by gamma (sum_j w_ij x^_j - x^_i); with
    gradients of all workers it is EF21.

    Args:
        inner: a contractive compressor of one message, such as ``topk(0.1)``.
        gamma: step size of gossip, in (0, 1]; less for a compressor that loses more. Left out, it
            is half the share of a normal vector's energy that ``inner`` sends.

    Example: ``difference(topk(0.25))``, ``difference(cast(bfloat16), 0.5)``.

    Differs from the paper: the exchange starts with the step and overlaps its gradient, so that a
    model is mixed before its own update, not after; and of the neighbours' copies only the weighted
    sum is kept, which the authors do, too.
    """
    if not isinstance(inner, Compressor):
        raise BadArgument(
            f"difference({inner})", "it wraps a compressor, for example difference(topk(0.1))"
        )
    if gamma is not None and not (is_number(gamma) and 0 < gamma <= 1):
        raise BadArgument(f"difference({inner}, {gamma})", "gamma must be a number in (0, 1]")
    _refuse(inner)

    def init(value: Value) -> tuple[Any, Any, Any]:
        wide = torch.promote_types(value.tensor.dtype, torch.float32)  # small changes must add up
        x_hat = torch.zeros_like(value.tensor, dtype=wide)
        return x_hat, torch.zeros_like(x_hat), inner.init(value)

    def flow(value: Value, state: tuple[Any, Any, Any], round: int) -> Flow:
        x_hat, s, held = state  # my public copy; the weighted sum of all copies I see
        change = value.tensor - x_hat
        opened = inner.flow(value.with_tensor(change), held, round)
        end = yield from _unrounded(opened, change.dtype)
        x_hat, s = x_hat + end.mine, s + end.mean
        like = value.tensor.dtype
        return Agreed(s.to(like), x_hat.to(like), (x_hat, s, end.state))

    traits = (inner.traits & Trait.SLICEABLE) | Trait.TRACKS
    told = "" if gamma is None else f", {typed(gamma)}"
    name = f"difference({inner.name}{told})"
    return Compressor(name, traits, flow, init, inner.add, gamma=gamma or _kept(inner) / 2)


def _unrounded(flow: Flow, dtype: torch.dtype) -> Flow:
    """Narrow numbers are summed where they arrive: rounded sums would let the copies drift."""

    def answer(ask: Ask) -> Generator[Ask, Any, Any]:
        if isinstance(ask, Mean) and ask.tensor.dtype != dtype:
            ask = Gather((ask.tensor,), add_dense, torch.empty_like(ask.tensor, dtype=dtype))
        return (yield ask)

    return through(flow, answer)


def _kept(inner: Compressor) -> float:
    """The share of a normal vector's energy that is sent: the paper's delta, on typical numbers."""
    x = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0))
    mine = drive(inner.flow(Value(x.clone()), inner.init(Value(x)), 0), alone).mine
    return float(1 - (x - mine).square().sum() / x.square().sum())


def _refuse(inner: Compressor) -> None:
    what, has = f"difference x {inner.name}", inner.traits
    if Trait.LOSSLESS in has:
        why, instead = "nothing is lost, so a copy is of no use", inner.name
    elif has & (Trait.CONSERVING | Trait.TRACKS):
        why, instead = "it keeps what was not sent, and so does the public copy", inner.name
    elif has & (Trait.MERGES | Trait.MOMENTUM):
        why, instead = "what comes of it is not the mean of what each sent", "topk"
    elif Trait.CONTRACTIVE not in has:
        why, instead = "it is not contractive: the copy runs away", "topk"
    elif Trait.ONE_SHOT not in has:
        why, instead = "its second message rests on an answer that neighbours do not share", "topk"
    else:
        return
    raise ConflictError([Conflict(what, why, instead)])
