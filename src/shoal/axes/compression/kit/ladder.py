"""Which of several compressors a bucket uses; pure, so that every worker chooses the same.

Each is tried for some rounds. The fastest stays, or a gentler one as fast, until it leaves too much
behind, until the step stands still for it twice as long or half, or until it has been a while.
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from shoal.axes.compression.kit.stopwatch import Known

TRIES = 4  # rounds a trial: the last three count, for the first runs on cold memory
CLEARLY = 0.9  # of another's seconds: less is faster for certain
CHANGED = 2.0  # times as long, or as short, at two looks in a row, is another link
SLIGHT = 0.1  # of a round's seconds: a smaller change of them is none
PATIENCE, LONGEST = 8, 128  # looks before a trial shows what changed unseen, doubled each time


class Note(NamedTuple):
    """What is remembered: numbers only, so that any checkpoint holds them."""

    seen: tuple[tuple[tuple[float, float], ...], ...]  # seconds of each rung's last rounds
    residuals: tuple[float, ...]
    bucket: int = 0
    at: int = 0  # the rung in use
    age: int = 0  # rounds since it is
    trying: bool = True
    chosen: int = 0
    ran: int = -1  # the rung of the round before
    odd: int = 0  # looks in a row at which the step stood still for another time
    quiet: int = 0  # looks since the last trial
    patience: int = PATIENCE
    usual: float = -1.0  # seconds that it stood still at the first look

    def numbers(self) -> list[float]:
        """Mine, to be added up over workers; the last one counts them."""
        rows = zip(self.seen, self.residuals, strict=True)
        return [n for seen, r in rows for n in (*map(median, zip(*seen, strict=True)), r)] + [1.0]


class Ladder(NamedTuple):
    """So many rungs, the gentlest first; rounds between looks; the largest residual allowed."""

    rungs: int
    every: int
    most: float

    def start(self) -> Note:
        """Before the first round."""
        return Note((((0.0, 0.0),) * (TRIES - 1),) * self.rungs, (0.0,) * self.rungs)

    def heard(self, note: Note, bucket: int, took: tuple[float, float] | None) -> Note:
        """Take in what the last round took; in another bucket all is tried anew."""
        if bucket != note.bucket:
            return self.start()._replace(bucket=bucket, chosen=note.chosen)
        row = list(note.seen)
        if took is not None and note.ran >= 0:
            row[note.ran] = (*row[note.ran][1:], took)
        return note._replace(seen=tuple(row))

    def weighs(self, note: Note) -> bool:
        """Whether what this round leaves behind counts."""
        return note.age == TRIES - 1 if note.trying else self.looks(note)

    def weighed(self, note: Note, residual: float) -> Note:
        """It does: so much; the few rounds of a trial do not make up for many before."""
        row = list(note.residuals)
        row[note.at] = max(residual, row[note.at]) if note.trying else residual
        return note._replace(residuals=tuple(row))

    def looks(self, note: Note) -> bool:
        """Whether all workers' numbers are asked for behind this round."""
        last = note.at == self.rungs - 1 and note.age == TRIES
        return last if note.trying else (note.age + 1) % self.every == 0

    def went(self, note: Note) -> Note:
        """A round is over."""
        note = note._replace(ran=note.at, age=note.age + 1)
        ends = note.trying and note.age == TRIES and note.at < self.rungs - 1
        return note._replace(at=note.at + 1, age=0) if ends else note

    def judged(self, note: Note, known: list[Known]) -> Note:
        """A round with a look is over: who runs from here on."""
        note, now = self.went(note), known[note.at]
        if note.trying:
            at = self.pick(known, note.chosen)
            return note._replace(at=at, age=0, trying=False, chosen=at)
        if now.residual > self.most:
            at = self.pick(known, note.chosen)
            note = note._replace(at=at, chosen=at)
        usual = now.exposed if note.usual < 0 else note.usual
        less, more = sorted((usual, now.exposed))
        odd = more > CHANGED * less and more - less > SLIGHT * (now.encode + more)
        note = note._replace(usual=usual, odd=(note.odd + 1) * odd, quiet=note.quiet + 1)
        anew = note._replace(at=0, age=0, trying=True, odd=0, quiet=0, usual=-1.0)
        if note.odd > 1:
            return anew
        if note.quiet < note.patience or not any(now[:2]):
            return note
        forgiven = tuple(r / 2 for r in note.residuals)
        return anew._replace(residuals=forgiven, patience=min(2 * note.patience, LONGEST))

    def pick(self, known: list[Known], current: int) -> int:
        """The fastest allowed; the current or a gentler one, unless another is clearly faster."""
        cost = [k.encode + k.exposed for k in known]
        bound = max(self.most, min(k.residual for k in known))
        allowed = [i for i, k in enumerate(known) if k.residual <= bound]
        bar = min(cost[i] for i in allowed) / CLEARLY
        bar = min(bar, cost[current]) if current in allowed else bar
        return next(i for i in allowed if cost[i] <= bar)


def why(known: list[Known], names: tuple[object, ...]) -> str:
    """What spoke for a rung and against the others."""
    told = [f"{1e3 * k.encode:.3g} + {1e3 * k.exposed:.3g} ms ({k.residual:.2g})" for k in known]
    rows = ", ".join(f"{name} {row}" for name, row in zip(names, told, strict=True))
    return f"encoding + exposed (residual in gradients): {rows}"
