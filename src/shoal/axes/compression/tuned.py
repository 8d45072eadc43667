"""Measure, then choose the compressor and its strength for each bucket, and choose again later.

The scheduling axis has an ``adaptive`` already, and names are unique over axes: hence ``tuned``.

References:
    Agarwal et al., `On the utility of gradient compression in distributed training systems
    <https://arxiv.org/abs/2103.00543>`_, 2022 (where encoding costs more than it saves).
    Agarwal et al., `Accordion <https://arxiv.org/abs/2010.16248>`_, 2021 (strength by norms).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import reduce
from operator import and_
from typing import Any

import torch

from shoal.axes.compression.cast import cast
from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.error_feedback import error_feedback
from shoal.axes.compression.exact import exact
from shoal.axes.compression.kit.ladder import TRIES, Ladder, Note, why
from shoal.axes.compression.kit.stopwatch import Known
from shoal.axes.compression.powersgd import powersgd
from shoal.axes.compression.topk import topk
from shoal.errors import BadArgument, Conflict, ConflictError
from shoal.flow import Agreed, Flow, Mean
from shoal.notation import typed

log = logging.getLogger("shoal")
EVERY, MOST = 20, 8.0
SAYS = "%s: %s: %s, was %s: %s"
KEEPS = Trait.LOSSLESS | Trait.CONSERVING


def tuned(*candidates: Compressor, every: int = EVERY, most: float = MOST) -> Compressor:
    """Try each candidate, keep the fastest for each bucket, and look again every few rounds.

    What counts are means over workers: seconds in flows (encoding, decoding), and seconds that the
    step stood still for messages. What backward hides is free; slow peers, and what a wire adds up,
    are not. Where nobody measures, as in lockstep, the first one stays.

    Args:
        candidates: two or more, the gentlest first; what one did not send the next one does. Left
            out, they are exact, cast(bfloat16), powersgd(4), topk(0.05), topk(0.01).
        every: rounds between looks, at which all workers compare their numbers.
        most: the largest norm of the residual, in norms of a gradient.

    Example: ``tuned``, ``tuned(exact, error_feedback(topk(0.25)), every=10)``,
    ``tuned(exact, cast(bfloat16), powersgd(2), most=4)``.
    """
    given = candidates or (exact(), cast(), powersgd(4), topk(0.05), topk(0.01))
    _refuse(given, every, most)
    options = [f"every={every}"] * (every != EVERY) + [f"most={typed(most)}"] * (most != MOST)
    words = ", ".join([*map(str, candidates), *options])
    name = f"tuned({words})" if words else "tuned"
    rungs = [m if m.traits & KEEPS else error_feedback(m) for m in given]
    ladder = Ladder(len(rungs), every, most)

    def init(value: Value) -> tuple[Any, ...]:
        states = [(rung.traits, rung.init(value)) for rung in rungs]
        rests = tuple(s[1:] if Trait.CONSERVING in traits else s for traits, s in states)
        return torch.zeros_like(value.tensor), rests, tuple(ladder.start())

    def flow(value: Value, state: tuple[Any, ...], round: int) -> Flow:
        residual, rests, numbers = state
        told = value.told
        note = ladder.heard(Note(*numbers), told.bucket, told.took)
        at, length = note.at, _norm(value.tensor) if ladder.weighs(note) else 0.0
        held = residual, rests[at], note.ran == at
        mean, own, (residual, rest) = yield from _run(rungs[at], value, held, round)
        if 0 < length < float("inf"):
            note = ladder.weighed(note, _norm(residual) / length)
        after = ladder.went(note)
        if ladder.looks(note):
            mine = torch.tensor(note.numbers(), dtype=torch.float32, device=mean.device)
            *said, workers = (yield Mean(mine)).tolist()
            known = [Known(*(n / workers for n in said[i : i + 3])) for i in range(0, len(said), 3)]
            after = ladder.judged(note, known)
            if told.label and after.chosen != note.chosen and (told.leads or not note.trying):
                chosen, before = given[after.chosen], given[note.chosen]
                log.info(SAYS, name, told.label, chosen, before, why(known, given))
        return Agreed(mean, own, (residual, (*rests[:at], rest, *rests[at + 1 :]), tuple(after)))

    shared = reduce(and_, (rung.traits for rung in rungs)) & (Trait.SLICEABLE | Trait.SUMS)
    return Compressor(name, shared | Trait.CONSERVING, flow, init, timed=True)


def _run(rung: Compressor, value: Value, held: tuple[torch.Tensor, Any, bool], round: int) -> Flow:
    """A round with one rung; one that takes over is given what others did not send, too."""
    residual, rest, goes_on = held
    if not goes_on:
        value = value.with_tensor(value.tensor + residual)
        residual = torch.zeros_like(residual)
    if Trait.LOSSLESS in rung.traits:
        mean, _, rest = yield from rung.flow(value.copied(), rest, round)
        return Agreed(mean, value.tensor, (residual, rest))
    mean, own, (residual, *rest) = yield from rung.flow(value, (residual, *rest), round)
    return Agreed(mean, own, (residual, tuple(rest)))


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.float()))


def _refuse(given: Sequence[Compressor], every: int, most: float) -> None:
    call = f"tuned({', '.join(map(str, given))}, every={every}, most={most})"
    if len(given) < 2 or not all(isinstance(m, Compressor) for m in given):
        raise BadArgument(call, "it takes compressors, two at least: tuned(exact, topk(0.01))")
    if not (type(every) is int and every > TRIES and type(most) in (int, float) and most > 0):
        raise BadArgument(call, f"every must be a whole number over {TRIES}, most a number over 0")
    for member in given:
        keeps = member.traits & (KEEPS | Trait.CONTRACTIVE) or member.feedback is not None
        if member.traits & (Trait.MERGES | Trait.MOMENTUM | Trait.FACTORS) or not keeps:
            told = "what it does not send is not simply added to what another sends next"
            raise ConflictError([Conflict(f"tuned x {member.name}", told, "topk, cast, powersgd")])
