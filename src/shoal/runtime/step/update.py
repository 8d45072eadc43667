"""End a step: average the gradients, check for NaN, clip, and update.

``clip`` bounds the norm of the averaged gradient, after decompression. If the user's loop uses a
``GradScaler``, it must unscale the gradients before ``run.update``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from shoal.errors import NonFinite, UsageError
from shoal.rules import Facts
from shoal.runtime.context import RunContext
from shoal.runtime.step.replica import Replica
from shoal.runtime.step.stats import PendingReports, Step, StepReports, StepStats

log = logging.getLogger("shoal")


class Updater:
    """Ends the steps of a run, with ``clip`` and ``nonfinite`` of its settings."""

    def __init__(self, context: RunContext, stats: StepStats) -> None:
        self.context, self.stats = context, stats
        self._seen: dict[Replica, int] = {}  # stats.events at the last update of a replica
        self._deferred: tuple[int, PendingReports] | None = None

    def update(self, replica: Replica, number: int) -> Step:
        """Exchange gradients and losses. Then update, or skip the update after a NaN or inf."""
        if replica.needs_closure:
            raise UsageError(
                f"{type(replica.optimizer).__name__} computes the loss several times a step, so it "
                "needs a closure: instead of run.step, call run.update(closure=...) with a "
                "function that calls run.forward and run.backward"
            )
        first = self._is_first(replica)
        self.check_deferred()
        own = self.stats.report()
        pending = replica.agree(own, number)
        if defers := replica.mode.defers:
            self._deferred = (number, pending)
        reports = StepReports((own,)) if defers and not own.bad else pending()
        skip = self._has_bad_loss(reports, number)
        if first and self.context.world.is_main:
            _warn_unused(replica)
        start = time.perf_counter()
        norm = None if skip or defers else self._norm(replica, number)
        skip = skip or (norm is not None and not math.isfinite(norm))
        if norm is not None and not skip and self.context.settings.clip:
            replica.model_part.clip(self.context.settings.clip, norm)
        if skip:
            replica.skip()
        waited = replica.finish(_no_update if skip else replica.optimizer.step)
        seconds = time.perf_counter() - start - waited
        recorder = self.context.recorder
        recorder.add("compute", "update", start, seconds, 0, number)
        if waited:
            recorder.add("wait", "agree", start + seconds, waited, 0, number)
        self.stats.clear()
        return Step(number, pending, skipped=skip, norm=norm)

    def _is_first(self, replica: Replica) -> bool:
        """Return whether this is the model's first update. Raise if no backward preceded it."""
        # One backward may compute gradients of several models, and each may then be updated.
        if self.stats.events == self._seen.get(replica, 0):
            raise UsageError(
                "run.update cannot run: run.backward was not called since the last update; call "
                "run.backward(loss), not loss.backward(), which would weigh samples wrongly"
            )
        first = replica not in self._seen
        self._seen[replica] = self.stats.events
        return first

    def check_deferred(self) -> None:
        """Check the losses of the last step for NaN, if its updates were deferred."""
        if self._deferred is not None:
            (number, pending), self._deferred = self._deferred, None
            self._has_bad_loss(pending(), number)

    def _has_bad_loss(self, reports: StepReports, number: int) -> bool:
        bad = reports.bad_ranks()
        if not bad:
            return False
        ranks = bad if len(reports.reports) > 1 else [self.context.world.rank]
        self._stop_or_skip("the loss", number, ranks)
        return True

    def _stop_or_skip(self, what: str, number: int, ranks: list[int]) -> None:
        """Raise `NonFinite`, or log that the step is skipped, depending on ``nonfinite``."""
        who = f"rank {', '.join(map(str, ranks))}" if ranks else "all ranks"
        if self.context.settings.nonfinite == "stop":
            raise NonFinite(
                f"{what} is NaN or inf at step {number} on {who}: lower the learning rate, clip, "
                "or inspect that batch; with nonfinite='skip', all workers skip such steps"
            )
        if self.context.world.is_main or ranks == [self.context.world.rank]:
            log.warning("step %d is skipped: %s is NaN or inf on %s", number, what, who)

    def _norm(self, replica: Replica, number: int) -> float | None:
        """Return the norm of the averaged gradient, or None if no setting needs the norm."""
        settings = self.context.settings
        if settings.clip is None and settings.nonfinite == "stop":
            return None
        norm = replica.model_part.norm()
        if not math.isfinite(norm):
            self._stop_or_skip("the gradient", number, [])
        return norm

    def closure(self, replica: Replica, closure: Callable[[], Tensor], number: int) -> Step:
        """Take one optimizer step. After each call of the closure, average loss and gradients."""
        settings, ranks = self.context.settings, self.context.world.size
        clips, skips = settings.clip is not None, settings.nonfinite == "skip"
        self.context.strategy.bind(Facts(ranks, clips=clips, skips=skips, closure=True))
        evaluations: list[StepReports] = []

        def averaged() -> float:
            self.stats.losses.clear()
            replica.clear()
            with torch.enable_grad():
                closure()
            reports = replica.agree(self.stats.report(), number)()
            self._has_bad_loss(reports, number)
            evaluations.append(reports)
            return reports.loss

        replica.optimizer.step(averaged)
        replica.clear()
        self.stats.clear()
        return Step(number, lambda: evaluations[0])


def _warn_unused(replica: Replica) -> None:
    """Warn of the parameters without a gradient, unless all parameters have none."""
    trainable = replica.model_part.trainable()
    unused = [name for name, p in trainable.items() if p.grad is None]
    if unused and len(unused) < len(trainable):
        more = f" and {len(unused) - 8} more" if len(unused) > 8 else ""
        log.warning(
            "no gradient reached %s%s: they keep their values; freeze them with "
            "requires_grad_(False) if that is intended",
            ", ".join(unused[:8]),
            more,
        )


def _no_update() -> None:
    """Replaces ``optimizer.step`` in a step that all workers skip."""
