"""Choose the fastest of several candidates by measured times, and notice when to choose again.

1. *Trial*: each candidate runs for some rounds, and the seconds of each round are recorded.
2. *Choice*: the ranks agree on the seconds, and the fastest candidate is chosen; the current one
   stays unless another is clearly faster.
3. *Watch*: rounds that take much longer, or much shorter, at two looks in a row mean that the link
   has changed, and a new trial begins.

The caller measures and communicates. A tuner only decides, so equal numbers give equal choices on
all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Sample = tuple[float, ...]  # seconds of one round, split into as many kinds as the caller measures


class TunerState(NamedTuple):
    """The progress of a tuner: numbers only, so that any checkpoint can hold them."""

    samples: tuple[tuple[Sample, ...], ...]  # the last rounds of each candidate
    residuals: tuple[float, ...] = ()  # of each compressor: norm of what it left unsent
    bucket: int = 0  # of a compressor: the bucket that was measured
    at: int = 0  # the candidate to run
    age: int = 0  # rounds that it has run; where candidates take turns, that all have run
    trying: bool = True  # in a trial
    chosen: int = 0  # by the last trial
    ran: int = -1  # the candidate of the round before
    odd: int = 0  # looks in a row at which rounds took another time than usual
    quiet: int = 0  # looks since the last trial
    patience: int = 0  # quiet looks before a trial without a visible change; doubled each time
    usual: float = -1.0  # seconds at the first look after the choice; -1 before it

    def summary(self, statistic: Callable[[Sequence[float]], float]) -> list[float]:
        """Return a statistic of the recorded rounds of each candidate."""
        return [statistic([sum(sample) for sample in row]) for row in self.samples]


@dataclass(frozen=True)
class Tuner:
    """The rules by which a state changes."""

    candidates: int  # how many there are
    tries: int = 1  # rounds of each in a trial
    clearly: float = 1.0  # of the current one's seconds: less is clearly faster
    changed: float = math.inf  # times as long or as short is another link
    takes_turns: bool = False  # run the candidates alternately, not one after the other
    ordered: bool = False  # of candidates about as fast choose the first, not the fastest
    window: int = 0  # samples to keep of each candidate; 0: all

    def start(self) -> TunerState:
        """Return the state before the first round."""
        return TunerState(((),) * self.candidates)

    def advance(self, state: TunerState) -> TunerState:
        """End a round, and select the candidate of the next one."""
        state = state._replace(ran=state.at, age=state.age + 1)
        if state.trying and self.takes_turns:
            return state._replace(at=(state.at + 1) % self.candidates)
        if state.trying and state.age == self.tries and state.at < self.candidates - 1:
            return state._replace(at=state.at + 1, age=0)
        return state

    def observe(self, state: TunerState, *seconds: float) -> TunerState:
        """Record what the last round took."""
        if state.ran < 0:
            return state
        rows = list(state.samples)
        rows[state.ran] = (*rows[state.ran], seconds)[-self.window :]
        return state._replace(samples=tuple(rows))

    def tried(self, state: TunerState) -> bool:
        """Return whether every candidate has run all of its tries."""
        rounds = self.tries * self.candidates if self.takes_turns else self.tries
        return state.trying and state.age >= rounds

    def best(self, seconds: Mapping[int, float], current: int = 0) -> int:
        """Return the current candidate, or the fastest if that is clearly faster.

        ``seconds`` holds only candidates that may be chosen, in their order.
        """
        fastest = min(seconds, key=seconds.__getitem__)
        least, own = seconds[fastest], seconds.get(current)
        if self.ordered:
            bound = least / self.clearly if own is None else min(least / self.clearly, own)
            return next(index for index, taken in seconds.items() if taken <= bound)
        return fastest if own is None or least < self.clearly * own else current

    def settle(self, state: TunerState, chosen: int) -> TunerState:
        """End a trial: from here on the chosen candidate runs."""
        return state._replace(at=chosen, age=0, trying=False, chosen=chosen)

    def look(self, state: TunerState, seconds: float, *, slight: float = 0.0) -> TunerState:
        """Compare the seconds of a round with the usual ones; after two odd looks, restart."""
        usual = seconds if state.usual < 0 else state.usual
        less, more = sorted((usual, seconds))
        differs = more > self.changed * less and more - less > slight
        return state._replace(usual=usual, odd=(state.odd + 1) * differs, quiet=state.quiet + 1)

    def restart(self, state: TunerState) -> TunerState:
        """Begin a new trial; what was recorded and chosen remains until it is replaced."""
        return state._replace(at=0, age=0, trying=True, odd=0, quiet=0, usual=-1.0)


def close(seconds: Mapping[int, float], within: float, most: int | None = None) -> list[int]:
    """Return ``most`` candidates that take ``within`` times the least seconds, fastest first."""
    fastest = sorted(seconds, key=seconds.__getitem__)[:most]
    return [index for index in fastest if seconds[index] <= within * seconds[fastest[0]]]
