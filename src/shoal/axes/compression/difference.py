"""Send the change of a value since the last round; all receivers keep a public copy of it.

In gossip, models are sent, and a model that loses entries is damaged. The difference between a
model and its public copy may lose entries: what was not sent is still a difference in the next
round, so errors die out.

References:
    Koloskova, Stich & Jaggi, `Decentralized stochastic optimization and gossip algorithms with
    compressed communication <https://arxiv.org/abs/1902.00340>`_, 2019, Algorithm 2 (CHOCO-SGD).
    Richtárik et al., `EF21 <https://arxiv.org/abs/2106.05203>`_, 2021 (the same for gradients).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from shoal.axes.compression.compressor import Compressor, Trait, Value, add_dense, check_inner
from shoal.errors import BadArgument, Conflict, ConflictError
from shoal.flow import Agreed, Ask, Dense, Flow, Gather, Mean, alone, drive, through
from shoal.notation import is_number, typed

NUMBERS = 4096  # of the vector on which the default of gamma is measured


def difference(inner: Compressor, gamma: float | None = None) -> Compressor:
    """Send by ``inner`` the difference to a public copy; what is lost is sent in later rounds.

    In gossip this is CHOCO-SGD: a model moves by gamma (sum_j w_ij x^_j - x^_i). With gradients of
    all workers it is EF21.

    Args:
        inner: a contractive compressor of one message, such as ``topk(0.1)``.
        gamma: step size of gossip, in (0, 1]; lower for a compressor that loses more. By default,
            half the share of a normal vector's energy that ``inner`` sends.

    Example: ``difference(topk(0.25))``, ``difference(cast(bfloat16), 0.5)``.

    Differs from the paper: the exchange starts with the step and overlaps its gradient, so that a
    model is mixed before its own update, not after it. Of the neighbours' copies only the weighted
    sum is kept, as the authors' code does.
    """
    check_inner(f"difference({inner})", inner, "difference(topk(0.1))")
    if gamma is not None and not (is_number(gamma) and 0 < gamma <= 1):
        raise BadArgument(f"difference({inner}, {gamma})", "gamma must be a number in (0, 1]")
    _refuse(inner)

    def init(value: Value) -> tuple[Any, Any, Any]:
        wide = torch.promote_types(value.tensor.dtype, torch.float32)  # small changes must add up
        x_hat = torch.zeros_like(value.tensor, dtype=wide)
        return x_hat, torch.zeros_like(x_hat), inner.init(value)

    def flow(value: Value, state: tuple[Any, Any, Any], round: int) -> Flow:
        x_hat, s, inner_state = state  # the public copy; the weighted sum of all workers' copies
        change = value.tensor - x_hat
        opened = inner.flow(value.with_tensor(change), inner_state, round)
        mean, mine, inner_state = yield from _unrounded(opened, change.dtype)
        x_hat, s = x_hat + mine.dense(), s + mean
        like = value.tensor.dtype
        return Agreed(s.to(like), Dense(x_hat.to(like)), (x_hat, s, inner_state))

    traits = (inner.traits & Trait.SLICEABLE) | Trait.TRACKS
    option = "" if gamma is None else f", {typed(gamma)}"
    name = f"difference({inner.name}{option})"
    return Compressor(name, traits, flow, init, inner.add, gamma=gamma or _energy(inner) / 2)


def _unrounded(flow: Flow, dtype: torch.dtype) -> Flow:
    """Gather narrow numbers and sum them in ``dtype``: rounded sums would let the copies drift."""

    def answer(ask: Ask) -> Generator[Ask, Any, Any]:
        if isinstance(ask, Mean) and ask.tensor.dtype != dtype:
            ask = Gather((ask.tensor,), add_dense, torch.empty_like(ask.tensor, dtype=dtype))
        return (yield ask)

    return through(flow, answer)


def _energy(inner: Compressor) -> float:
    """Return the share of a normal vector's energy that is sent: the paper's delta, estimated."""
    x = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0))
    mine = drive(inner.flow(Value(x.clone()), inner.init(Value(x)), 0), alone).mine.dense()
    return float(1 - (x - mine).square().sum() / x.square().sum())


def _refuse(inner: Compressor) -> None:
    has = inner.traits
    if Trait.LOSSLESS in has:
        why, instead = "nothing is lost, so a public copy is of no use", inner.name
    elif has & (Trait.CONSERVING | Trait.TRACKS):
        why, instead = "it keeps what was not sent, and so does the public copy", inner.name
    elif has & (Trait.MERGES | Trait.MOMENTUM):
        why, instead = "its result is not the mean of what each worker sent", "topk"
    elif Trait.CONTRACTIVE not in has:
        why, instead = "it is not contractive: the public copy diverges", "topk"
    elif Trait.ONE_SHOT not in has:
        why, instead = "its second message needs an answer that neighbours do not share", "topk"
    else:
        return
    raise ConflictError([Conflict(f"difference x {inner.name}", why, instead)])
