"""Measure, then choose the compressor and its strength for each bucket, and choose again later.

Each bucket tries every candidate for some rounds and keeps the fastest, or a gentler one that is
about as fast. It chooses again when the candidate leaves too much unsent, when exposed waits become
twice as long or half as long, and from time to time, because small messages hide a faster link.

The scheduling axis has an ``adaptive`` already, and names are unique over axes: hence ``tuned``.

References:
    Agarwal et al., `On the utility of gradient compression in distributed training systems
    <https://arxiv.org/abs/2103.00543>`_, 2022 (where encoding costs more than it saves).
    Agarwal et al., `Accordion <https://arxiv.org/abs/2010.16248>`_, 2021 (strength by norms).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from statistics import median
from typing import Any, NamedTuple

import torch

from shoal.axes.compression.cast import cast
from shoal.axes.compression.compressor import BucketTiming, Compressor, Trait, Value
from shoal.axes.compression.error_feedback import error_feedback
from shoal.axes.compression.exact import exact
from shoal.axes.compression.powersgd import powersgd
from shoal.axes.compression.topk import topk
from shoal.errors import BadArgument, Conflict, ConflictError
from shoal.flow import Agreed, Dense, Flow, Mean
from shoal.notation import typed
from shoal.tuner import Tuner, TunerState

log = logging.getLogger("shoal")
EVERY, MOST = 20, 8.0
TRIES = 4  # rounds of each candidate in a trial; the last three count: the first has cold caches
CLEARLY = 0.9  # of the current one's seconds: less is clearly faster
CHANGED = 2.0  # times as long or as short, at two looks in a row, is another link
SLIGHT = 0.1  # of a round's seconds: a smaller change is none
PATIENCE, LONGEST = 8, 128  # looks before a trial without a visible change; doubled each time
NO_LOSS = Trait.LOSSLESS | Trait.CONSERVING


def tuned(*candidates: Compressor, every: int = EVERY, most: float = MOST) -> Compressor:
    """Try each candidate, keep the fastest for each bucket, and look again every few rounds.

    A candidate costs the seconds of its flows (encoding, decoding) and of exposed communication, as
    means over workers. What backward hides costs nothing; waiting for slow peers, and sums that a
    wire computes, do cost. Where no seconds are measured, as in lockstep, the first one stays.

    Args:
        candidates: two or more, the gentlest first; what one leaves unsent the next one sends. The
            default is exact, cast(bfloat16), powersgd(4), topk(0.05), topk(0.01).
        every: rounds between looks, at which all workers compare their numbers.
        most: the largest norm of the residual, in norms of a gradient.

    Example: ``tuned``, ``tuned(exact, error_feedback(topk(0.25)), every=10)``,
    ``tuned(exact, cast(bfloat16), powersgd(2), most=4)``.
    """
    members = candidates or (exact(), cast(), powersgd(4), topk(0.05), topk(0.01))
    _refuse(members, every, most)
    options = [f"every={every}"] * (every != EVERY) + [f"most={typed(most)}"] * (most != MOST)
    arguments = ", ".join([*map(str, candidates), *options])
    name = f"tuned({arguments})" if arguments else "tuned"
    forms = [m if m.traits & NO_LOSS else error_feedback(m) for m in members]
    tuner = CompressorTuner(len(forms), every=every, most=most)

    def init(value: Value) -> tuple[Any, ...]:
        states = [(form.traits, form.init(value)) for form in forms]
        rests = tuple(s[1:] if Trait.CONSERVING in traits else s for traits, s in states)
        return torch.zeros_like(value.tensor), rests, tuple(tuner.start())

    def flow(value: Value, state: tuple[Any, ...], round: int) -> Flow:
        residual, rests, numbers = state
        timing = value.timing
        before = tuner.observe_timing(TunerState(*numbers), timing)
        at, norm = before.at, _norm(value.tensor) if tuner.measures_residual(before) else 0.0
        own_state = residual, rests[at], before.ran == at
        mean, own, (residual, rest) = yield from _run(forms[at], value, own_state, round)
        if 0 < norm < float("inf"):
            before = tuner.record_residual(before, _norm(residual) / norm)
        after = tuner.advance(before)
        if tuner.compares(before):
            local = torch.tensor(_numbers(before), dtype=torch.float32, device=mean.device)
            costs = _costs((yield Mean(local)).tolist())
            after = tuner.judge(before, costs)
            changes = after.chosen != before.chosen
            if timing.label and changes and (timing.leads or not before.trying):
                pair = members[after.chosen], members[before.chosen]
                log.info("%s: %s: %s, was %s: %s", name, timing.label, *pair, why(costs, members))
        return Agreed(mean, own, (residual, (*rests[:at], rest, *rests[at + 1 :]), tuple(after)))

    shared = reduce(and_, (form.traits for form in forms)) & (Trait.SLICEABLE | Trait.SUMS)
    return Compressor(name, shared | Trait.CONSERVING, flow, init, timed=True)


class CandidateCost(NamedTuple):
    """What rounds of one candidate cost, as the mean over all workers."""

    encode: float  # seconds
    exposed: float  # seconds
    residual: float  # its norm, in norms of a gradient


@dataclass(frozen=True)
class CompressorTuner(Tuner):
    """Chooses the compressor of a bucket; candidates are ordered from the gentlest on.

    Args:
        every: rounds between looks.
        most: the largest residual allowed.
    """

    tries: int = TRIES
    clearly: float = CLEARLY
    changed: float = CHANGED
    ordered: bool = True
    window: int = TRIES - 1
    every: int = EVERY
    most: float = MOST

    def start(self) -> TunerState:
        """Return the state before the first round: what was never measured costs nothing."""
        samples = (((0.0, 0.0),) * self.window,) * self.candidates
        return TunerState(samples, (0.0,) * self.candidates, patience=PATIENCE)

    def observe_timing(self, state: TunerState, timing: BucketTiming) -> TunerState:
        """Record what the last round took; a value in another bucket begins anew."""
        if timing.bucket != state.bucket:
            return self.start()._replace(bucket=timing.bucket, chosen=state.chosen)
        return state if timing.took is None else self.observe(state, *timing.took)

    def measures_residual(self, state: TunerState) -> bool:
        """Return whether to measure the residual that this round leaves."""
        return state.age == self.tries - 1 if state.trying else self.compares(state)

    def record_residual(self, state: TunerState, residual: float) -> TunerState:
        """Record a residual; in a trial only a larger one, because it has few rounds to grow."""
        row = list(state.residuals)
        row[state.at] = max(residual, row[state.at]) if state.trying else residual
        return state._replace(residuals=tuple(row))

    def compares(self, state: TunerState) -> bool:
        """Return whether all workers compare their numbers after this round."""
        return self.tried(state) if state.trying else (state.age + 1) % self.every == 0

    def judge(self, state: TunerState, costs: list[CandidateCost]) -> TunerState:
        """End a round that has a look: choose, or begin a new trial if it is time."""
        now, state = costs[state.at], self.advance(state)
        if state.trying:
            return self.settle(state, self.pick(costs, state.chosen))
        if now.residual > self.most:
            at = self.pick(costs, state.chosen)
            state = state._replace(at=at, chosen=at)
        slight = SLIGHT * (now.encode + max(now.exposed, state.usual))
        state = self.look(state, now.exposed, slight=slight)
        if state.odd > 1:
            return self.restart(state)
        if state.quiet < state.patience or not any(now[:2]):
            return state
        halved = tuple(residual / 2 for residual in state.residuals)  # it may have become better
        patience = min(2 * state.patience, LONGEST)
        return self.restart(state)._replace(residuals=halved, patience=patience)

    def pick(self, costs: list[CandidateCost], current: int) -> int:
        """Return the best candidate among those whose residual is allowed, or is the smallest."""
        bound = max(self.most, min(cost.residual for cost in costs))
        allowed = ((i, c) for i, c in enumerate(costs) if c.residual <= bound)
        return self.best({i: c.encode + c.exposed for i, c in allowed}, current)


def _numbers(state: TunerState) -> list[float]:
    """Return the numbers of this worker, to be added up over workers; the last counts them."""
    rows = zip(state.samples, state.residuals, strict=True)
    return [n for row, r in rows for n in (*map(median, zip(*row, strict=True)), r)] + [1.0]


def _costs(numbers: list[float]) -> list[CandidateCost]:
    """Read the sums of all workers' numbers."""
    *sums, workers = numbers
    return [CandidateCost(*(n / workers for n in sums[i : i + 3])) for i in range(0, len(sums), 3)]


def why(costs: list[CandidateCost], names: Sequence[object]) -> str:
    """Say what each candidate costs."""
    rows = (
        f"{name} {1e3 * cost.encode:.3g} + {1e3 * cost.exposed:.3g} ms ({cost.residual:.2g})"
        for name, cost in zip(names, costs, strict=True)
    )
    return f"encoding + exposed (residual in gradients): {', '.join(rows)}"


def _run(form: Compressor, value: Value, state: tuple[torch.Tensor, Any, bool], round: int) -> Flow:
    """Run a round with one candidate; one that takes over sends what others left unsent, too."""
    residual, rest, ran_before = state
    if not ran_before:
        value = value.with_tensor(value.tensor + residual)
        residual = torch.zeros_like(residual)
    if Trait.LOSSLESS in form.traits:
        mean, _, rest = yield from form.flow(value.copied(), rest, round)
        return Agreed(mean, Dense(value.tensor), (residual, rest))
    mean, own, (residual, *rest) = yield from form.flow(value, (residual, *rest), round)
    return Agreed(mean, own, (residual, tuple(rest)))


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.float()))


def _refuse(members: Sequence[Compressor], every: int, most: float) -> None:
    """Raise what is wrong with the arguments of ``tuned``."""
    call = f"tuned({', '.join(map(str, members))}, every={every}, most={most})"
    if len(members) < 2 or not all(isinstance(m, Compressor) for m in members):
        raise BadArgument(call, "it takes compressors, two at least: tuned(exact, topk(0.01))")
    if not (type(every) is int and every > TRIES and type(most) in (int, float) and most > 0):
        raise BadArgument(call, f"every must be a whole number over {TRIES}, most a number over 0")
    for member in members:
        keeps = member.traits & (NO_LOSS | Trait.CONTRACTIVE) or member.contraction is not None
        if member.traits & (Trait.MERGES | Trait.MOMENTUM | Trait.FACTORS) or not keeps:
            reason = "another candidate cannot send later what this one leaves unsent"
            alternatives = "topk, cast, powersgd"
            raise ConflictError([Conflict(f"tuned x {member.name}", reason, alternatives)])
