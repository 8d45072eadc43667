"""Choose the compressor of each bucket by measured times, and choose again when they change.

In a trial, each candidate compresses a bucket for some rounds. Then the fastest is chosen, or one
with less loss that is about as fast. A new choice is made when the residual becomes too large, when
exposed waiting takes twice or half as long, and from time to time without such a reason,
because a faster link is not noticed while messages are small.

References:
    Agarwal et al., `On the utility of gradient compression in distributed training systems
    <https://arxiv.org/abs/2103.00543>`_, 2022 (encoding often takes longer than it saves).
    Agarwal et al., `Accordion <https://arxiv.org/abs/2010.16248>`_, 2021 (ratio by gradient norms).
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
EVERY, MOST = 20, 8.0  # defaults of ``tuned``
TRIES = 4  # rounds of each candidate in a trial; the first is not counted, because caches are cold
CLEARLY = 0.9  # a candidate with at most 1 / CLEARLY times the least seconds is about as fast
CHANGED = 2.0  # a trial starts if exposed seconds differ by this factor at two looks in a row
SLIGHT = 0.1  # a change below this share of a round's seconds is ignored
PATIENCE, LONGEST = 8, 128  # looks until a trial without a reason; doubled each time up to LONGEST
NO_LOSS = Trait.LOSSLESS | Trait.CONSERVING


def tuned(*candidates: Compressor, every: int = EVERY, most: float = MOST) -> Compressor:
    """Time each candidate, use the fastest for each bucket, and check the choice every few rounds.

    The cost of a candidate is the time that its flows compute (encode, decode) plus the exposed
    time of communication, averaged over workers. Communication during backward costs nothing, but
    waiting for slow workers does. If no times are measured, the first candidate is chosen.

    Args:
        candidates: two or more compressors, in the order of their loss, the least first. What one
            candidate did not send, the next one that runs sends. The default is exact,
            cast(bfloat16), powersgd(4), topk(0.05), topk(0.01).
        every: rounds from one look to the next. At a look, workers exchange their measurements.
        most: the largest allowed norm of a residual, in multiples of the norm of the gradient.

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
                words = name, timing.label, *pair, cost_text(costs, members)
                log.info("%s: %s: chose %s, before %s: %s", *words)
        return Agreed(mean, own, (residual, (*rests[:at], rest, *rests[at + 1 :]), tuple(after)))

    shared = reduce(and_, (form.traits for form in forms)) & (Trait.SLICEABLE | Trait.SUMS)
    return Compressor(name, shared | Trait.CONSERVING, flow, init, timed=True)


class CandidateCost(NamedTuple):
    """The cost of a round of one candidate, averaged over all workers."""

    encode: float  # seconds that flows compute
    exposed: float  # seconds of exposed waiting
    residual: float  # norm of the residual, in multiples of the norm of the gradient


@dataclass(frozen=True)
class CompressorTuner(Tuner):
    """Chooses the compressor of a bucket; the candidates are ordered from the least loss on.

    Args:
        every: rounds from one look to the next.
        most: the largest allowed residual, in multiples of the norm of the gradient.
    """

    tries: int = TRIES
    clearly: float = CLEARLY
    changed: float = CHANGED
    ordered: bool = True
    window: int = TRIES - 1
    every: int = EVERY
    most: float = MOST

    def start(self) -> TunerState:
        """Return the state before the first round; all seconds and residuals are 0."""
        samples = (((0.0, 0.0),) * self.window,) * self.candidates
        return TunerState(samples, (0.0,) * self.candidates, patience=PATIENCE)

    def observe_timing(self, state: TunerState, timing: BucketTiming) -> TunerState:
        """Record the seconds of the last round. If the bucket has changed, start a new trial."""
        if timing.bucket != state.bucket:
            return self.start()._replace(bucket=timing.bucket, chosen=state.chosen)
        return state if timing.took is None else self.observe(state, *timing.took)

    def measures_residual(self, state: TunerState) -> bool:
        """Return whether to measure the residual after this round."""
        return state.age == self.tries - 1 if state.trying else self.compares(state)

    def record_residual(self, state: TunerState, residual: float) -> TunerState:
        """Record a residual. In a trial, keep a larger earlier one, because trials are short."""
        row = list(state.residuals)
        row[state.at] = max(residual, row[state.at]) if state.trying else residual
        return state._replace(residuals=tuple(row))

    def compares(self, state: TunerState) -> bool:
        """Return whether all workers exchange their measurements after this round (a look)."""
        return self.tried(state) if state.trying else (state.age + 1) % self.every == 0

    def judge(self, state: TunerState, costs: list[CandidateCost]) -> TunerState:
        """Return the state after a look, which may choose a candidate or begin a new trial."""
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
        halved = tuple(residual / 2 for residual in state.residuals)  # give each a new chance
        patience = min(2 * state.patience, LONGEST)
        return self.restart(state)._replace(residuals=halved, patience=patience)

    def pick(self, costs: list[CandidateCost], current: int) -> int:
        """Return the best candidate with an allowed residual, or else that with the least one."""
        bound = max(self.most, min(cost.residual for cost in costs))
        allowed = ((i, c) for i, c in enumerate(costs) if c.residual <= bound)
        return self.best({i: c.encode + c.exposed for i, c in allowed}, current)


def _numbers(state: TunerState) -> list[float]:
    """Return this worker's measurements, to be averaged over workers, and a 1 as their weight."""
    rows = zip(state.samples, state.residuals, strict=True)
    return [n for row, r in rows for n in (*map(median, zip(*row, strict=True)), r)] + [1.0]


def _costs(numbers: list[float]) -> list[CandidateCost]:
    """Return the costs from the average of all workers' :func:`_numbers`."""
    *sums, workers = numbers
    return [CandidateCost(*(n / workers for n in sums[i : i + 3])) for i in range(0, len(sums), 3)]


def cost_text(costs: list[CandidateCost], names: Sequence[object]) -> str:
    """Return a text with the costs of each candidate, for the log."""
    rows = (
        f"{name} {1e3 * cost.encode:.3g} + {1e3 * cost.exposed:.3g} ms ({cost.residual:.2g})"
        for name, cost in zip(names, costs, strict=True)
    )
    return f"computing + exposed waiting (residual / gradient norm): {', '.join(rows)}"


def _run(form: Compressor, value: Value, state: tuple[torch.Tensor, Any, bool], round: int) -> Flow:
    """Run a round of one candidate. If another ran before, also send what that one did not send."""
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
    """Raise if an argument of ``tuned`` is wrong."""
    call = f"tuned({', '.join(map(str, members))}, every={every}, most={most})"
    if len(members) < 2 or not all(isinstance(m, Compressor) for m in members):
        raise BadArgument(call, "give two or more compressors, as in tuned(exact, topk(0.01))")
    if not (type(every) is int and every > TRIES and type(most) in (int, float) and most > 0):
        raise BadArgument(call, f"every must be a whole number > {TRIES}, and most a number > 0")
    for member in members:
        keeps = member.traits & (NO_LOSS | Trait.CONTRACTIVE) or member.contraction is not None
        if member.traits & (Trait.MERGES | Trait.MOMENTUM | Trait.FACTORS) or not keeps:
            reason = f"another candidate cannot send later what {member.name} did not send"
            alternatives = "use topk, cast or powersgd"
            raise ConflictError([Conflict(f"tuned x {member.name}", reason, alternatives)])
