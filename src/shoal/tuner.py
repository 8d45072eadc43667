"""Choose the fastest of several candidates by measured times, and detect when to choose again.

1. *Trial*: each candidate runs for some rounds, and the seconds of each round are recorded.
2. *Choice*: the ranks agree on the seconds, and :meth:`Tuner.best` chooses one of the fastest.
3. *Watch*: now and then :meth:`Tuner.look` compares a round's seconds with the usual ones. If they
   differ much at two looks in a row, the link has changed, and the caller begins a new trial.

The caller measures and communicates. A tuner only computes the next state, so ranks that pass the
same numbers make the same choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Sample = tuple[float, ...]  # seconds of the parts of one round; their sum is the round's time


class TunerState(NamedTuple):
    """The state of a tuner; it has only numbers, so it can be saved in a checkpoint."""

    samples: tuple[tuple[Sample, ...], ...]  # the recorded rounds of each candidate
    residuals: tuple[float, ...] = ()  # used by ``tuned``: relative residual of each candidate
    bucket: int = 0  # used by ``tuned``: the bucket that the samples are from
    at: int = 0  # index of the candidate to run
    # In a trial, ``age`` counts the rounds of ``at``, or of all candidates if they take turns.
    age: int = 0  # rounds of the running trial (see above), or rounds since the last trial
    trying: bool = True  # whether a trial is running
    chosen: int = 0  # index of the candidate that was chosen last
    ran: int = -1  # index of the candidate of the last round; -1 before the first round
    odd: int = 0  # looks in a row at which the seconds differed much from ``usual``
    quiet: int = 0  # looks since the last trial
    patience: int = 0  # used by ``tuned``: looks until a trial begins even without a change
    usual: float = -1.0  # seconds at the first look after the trial; -1 before that look

    def summary(self, statistic: Callable[[Sequence[float]], float]) -> list[float]:
        """Return for each candidate a statistic of its recorded seconds per round."""
        return [statistic([sum(sample) for sample in row]) for row in self.samples]


@dataclass(frozen=True)
class Tuner:
    """Functions from one :class:`TunerState` to the next, and their thresholds."""

    candidates: int  # number of candidates
    tries: int = 1  # rounds of each candidate in a trial
    clearly: float = 1.0  # a candidate is clearly faster if its seconds < this * the current one's
    changed: float = math.inf  # if seconds change by more than this factor, the link has changed
    takes_turns: bool = False  # in a trial, change the candidate after every round
    ordered: bool = False  # of all candidates that are about as fast as the fastest, take the first
    window: int = 0  # number of last samples to keep of each candidate, or 0 to keep all

    def start(self) -> TunerState:
        """Return the state before the first round."""
        return TunerState(((),) * self.candidates)

    def advance(self, state: TunerState) -> TunerState:
        """Return the state after a round, in which ``at`` is the candidate of the next round."""
        state = state._replace(ran=state.at, age=state.age + 1)
        if state.trying and self.takes_turns:
            return state._replace(at=(state.at + 1) % self.candidates)
        if state.trying and state.age == self.tries and state.at < self.candidates - 1:
            return state._replace(at=state.at + 1, age=0)
        return state

    def observe(self, state: TunerState, *seconds: float) -> TunerState:
        """Return the state with the seconds of the last round recorded for its candidate."""
        if state.ran < 0:
            return state
        rows = list(state.samples)
        rows[state.ran] = (*rows[state.ran], seconds)[-self.window :]
        return state._replace(samples=tuple(rows))

    def tried(self, state: TunerState) -> bool:
        """Return whether a trial is running and every candidate has run its number of rounds."""
        rounds = self.tries * self.candidates if self.takes_turns else self.tries
        return state.trying and state.age >= rounds

    def best(self, seconds: Mapping[int, float], current: int = 0) -> int:
        """Return the fastest candidate if it is clearly faster than ``current``, else ``current``.

        If ``ordered``, return the first candidate whose seconds are at most the least / ``clearly``
        and at most those of ``current``. A ``current`` without seconds is ignored.
        """
        fastest = min(seconds, key=seconds.__getitem__)
        least, own = seconds[fastest], seconds.get(current)
        if self.ordered:
            bound = least / self.clearly if own is None else min(least / self.clearly, own)
            return next(index for index, taken in seconds.items() if taken <= bound)
        return fastest if own is None or least < self.clearly * own else current

    def settle(self, state: TunerState, chosen: int) -> TunerState:
        """Return the state after a trial, in which the chosen candidate runs."""
        return state._replace(at=chosen, age=0, trying=False, chosen=chosen)

    def look(self, state: TunerState, seconds: float, *, slight: float = 0.0) -> TunerState:
        """Return the state after a look.

        ``odd`` grows by 1 if the seconds differ from ``usual`` by more than the factor ``changed``
        and by more than ``slight`` seconds; else it becomes 0.
        """
        usual = seconds if state.usual < 0 else state.usual
        less, more = sorted((usual, seconds))
        differs = more > self.changed * less and more - less > slight
        return state._replace(usual=usual, odd=(state.odd + 1) * differs, quiet=state.quiet + 1)

    def restart(self, state: TunerState) -> TunerState:
        """Return the state at the start of a new trial, with the same samples and ``chosen``."""
        return state._replace(at=0, age=0, trying=True, odd=0, quiet=0, usual=-1.0)


def close(seconds: Mapping[int, float], within: float, most: int | None = None) -> list[int]:
    """Return at most ``most`` candidates with seconds <= ``within`` * the least, fastest first."""
    fastest = sorted(seconds, key=seconds.__getitem__)[:most]
    return [index for index in fastest if seconds[index] <= within * seconds[fastest[0]]]
