"""The end of a step, in its order: agree, look for NaN, clip, update.

Clipping and loss scaling. The norm that ``clip`` bounds is that of the agreed gradient: compression
comes before, the update after. Losses are scaled by samples only, so no unscaling is needed; a
``GradScaler`` of one's own must unscale before ``run.update``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.runtime import validate as closures
from shoal.runtime.context import RunContext
from shoal.runtime.step.replica import Replica
from shoal.runtime.step.stats import Step, StepReports, StepStats, nonfinite

log = logging.getLogger("shoal")


class Updater:
    """Ends steps.

    Args:
        context: whose settings say what to clip and what to do about NaN.
        tally: what the step added up.
    """

    def __init__(self, context: RunContext, tally: StepStats) -> None:
        self.context = context
        self.tally = tally
        self._seen: dict[Replica, int] = {}
        self._late: tuple[int, Callable[[], StepReports]] | None = None
        self.total = 0  # samples of the last step of all workers, where the next may be guessed

    def update(self, replica: Replica, number: int) -> Step:
        """Agree on gradients and loss, then update or skip."""
        closures.refuse_without(replica.optimizer)
        first = self._refuse_if_nothing_new(replica)
        self.look_back()
        word = self.tally.word()
        ask = replica.agree(word, number) or partial(StepReports, (word,))
        early = replica.early is not None
        self._late = (number, ask) if early else None
        table = StepReports((word,)) if early and not word.bad else ask()
        skip = self._bad_losses(table, number)
        if not early:
            self._correct(replica, table)
        if first and self.context.world.is_main:
            _tell_unused(replica)
        start = time.perf_counter()
        norm = None if skip or early else self._norm(replica, number)
        skip = skip or (norm is not None and not math.isfinite(norm))
        if norm is not None and not skip and self.context.settings.clip:
            replica.source.clip(self.context.settings.clip, norm)
        if skip:
            replica.forgo()
        waited = replica.update(_nothing if skip else replica.optimizer.step)
        seconds = time.perf_counter() - start - waited
        self.context.recorder.add("compute", "update", start, seconds, 0, number)
        if waited:
            self.context.recorder.add("wait", "agree", start + seconds, waited, 0, number)
        self.tally.clear()
        return Step(number, ask, skipped=skip, norm=norm)

    def _refuse_if_nothing_new(self, replica: Replica) -> bool:
        """Whether it is the model's first update."""
        # One backward may serve several models, so it counts for each until it was updated.
        if self.tally.noted == self._seen.get(replica, 0):
            raise UsageError(
                "run.update, but run.backward was not called since the last update: call "
                "run.backward(loss), not loss.backward(), which would weigh samples wrongly"
            )
        first = replica not in self._seen
        self._seen[replica] = self.tally.noted
        return first

    def look_back(self) -> None:
        """With early updates everybody's losses are known a step later: look at them then."""
        if self._late is not None:
            (number, ask), self._late = self._late, None
            self._bad_losses(ask(), number)

    def _correct(self, replica: Replica, table: StepReports) -> None:
        """The step's samples were guessed to be as many as last time: put right what was not."""
        if replica.engine is None and not self.tally.guess:
            return  # alone, or every step is counted
        if self.tally.guess and table.samples and table.samples != self.tally.guess:
            replica.scale(self.tally.guess / table.samples)
        exact = replica.engine is not None and replica.engine.rides
        self.total = table.samples if exact else 0

    def _bad_losses(self, table: StepReports, number: int) -> bool:
        bad = table.bad_ranks()
        if not bad:
            return False
        ranks = bad if len(table.words) > 1 else [self.context.world.rank]
        if self.context.settings.nonfinite == "stop":
            raise nonfinite("the loss", number, ranks)
        self._skipped("the loss", number, ranks)
        return True

    def _skipped(self, what: str, number: int, ranks: list[int]) -> None:
        if self.context.world.is_main or ranks == [self.context.world.rank]:
            who = f"rank {', '.join(map(str, ranks))}" if ranks else "all ranks"
            log.warning("step %d is skipped: %s is NaN or inf on %s", number, what, who)

    def _norm(self, replica: Replica, number: int) -> float | None:
        """Of the agreed gradient, where somebody needs it; the same on every worker."""
        settings = self.context.settings
        if settings.clip is None and settings.nonfinite == "stop":
            return None
        norm = replica.source.norm()
        if not math.isfinite(norm) and settings.nonfinite == "stop":
            raise nonfinite("the gradient", number, [])
        if not math.isfinite(norm):
            self._skipped("the gradient", number, [])
        return norm

    def closure(self, replica: Replica, closure: Callable[[], Tensor], number: int) -> Step:
        """Let the optimizer call ``closure`` as often as it likes; each call is agreed on."""
        closures.refuse(self.context.strategy, self.context.settings, ranks=self.context.world.size)
        seen: list[StepReports] = []

        def agreed() -> float:
            self.tally.losses.clear()
            replica.clear()
            with torch.enable_grad():
                closure()
            word = self.tally.word()
            ask = replica.agree(word, number)
            table = StepReports((word,)) if ask is None else ask()
            self._bad_losses(table, number)
            self._correct(replica, table)
            seen.append(table)
            return table.loss

        replica.optimizer.step(agreed)
        replica.clear()
        self.tally.clear()
        return Step(number, lambda: seen[0])


def _tell_unused(replica: Replica) -> None:
    """Name the parameters that the first step did not reach; none at all says nothing here."""
    trained = replica.source.trainable()
    unused = [name for name, p in trained.items() if p.grad is None]
    if unused and len(unused) < len(trained):
        more = f" and {len(unused) - 8} more" if len(unused) > 8 else ""
        log.warning(
            "no gradient reached %s%s: they keep their values; freeze them with "
            "requires_grad_(False) if that is meant",
            ", ".join(unused[:8]),
            more,
        )


def _nothing() -> None:
    """A step that is skipped updates nothing, on every worker."""
