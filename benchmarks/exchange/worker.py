"""What a worker of ``shoal bench exchange`` does; run as a module with the path of a job.

A job is one workload and seed, and contenders that train it one after the other in the same
processes. Rank 0 writes a line of JSON for each: the curve of held-out loss against seconds of
training. The clock stands still while the loss is measured; a span of steps takes as long as the
slowest worker took.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from shoal.bench.contenders import loss
from shoal.bench.exchange import sockets
from shoal.bench.exchange.contenders import (
    DDP,
    EXACT,
    NULL,
    OUR_POWERSGD,
    POWERSGD,
    Trainer,
    build,
    period,
)
from shoal.bench.exchange.judge import Smooth, reaches
from shoal.bench.exchange.links import ask_for_rate
from shoal.bench.exchange.tasks import WORKLOADS, held_out, make
from shoal.bench.exchange.telling import mean, most, tell

NULL_STEPS, WARM_UP_STEPS = 4, 1
LEAST_SECONDS = 10.0
EXACT_PATIENCE = 1.3  # how many steps exact needs must be known
HOOK_PATIENCE = 1.55  # of our powersgd's time: by then torch's hook has lost, or its time is known
TIMEOUT = timedelta(minutes=2)  # of one exchange; the slowest takes seconds


@dataclass(frozen=True)
class Job:
    """What to do.

    Attributes:
        workload: name of the model and its data.
        seed: of parameters and samples.
        contenders: who trains, in this order; DDP is always first.
        steps: of DDP; the others have until they reach its loss.
        target: the loss to reach; None: what DDP reaches.
        every: steps between looks at the loss; twice as many in the first half.
        most_seconds: nobody trains longer.
        most_steps: nor further, in multiples of ``steps``.
        patience: who takes so many times as long as DDP wins nothing, and is stopped.
        rates: of the links while a contender gets ready, and while it trains; none: as they are.
    """

    workload: str
    seed: int
    contenders: tuple[str, ...]
    steps: int
    target: float | None = None
    every: int = 4
    most_seconds: float = 120.0
    most_steps: float = 3.0
    patience: float = 0.6
    rates: tuple[str, str] | tuple[()] = ()


class Race:
    """Contenders of one job in this worker."""

    def __init__(self, job: Job, path: Path) -> None:
        self.job, self.path, self.rank = job, path, dist.get_rank()
        self.most_seconds, self.free = job.most_seconds, list[float]()
        self.workload = WORKLOADS[job.workload]
        self.data = self.workload.data()
        self.held_out = held_out(self.workload, self.data, self.rank, dist.get_world_size())

    def run(self) -> None:
        """All of them, DDP first: its last loss is what the others are to reach.

        Before and after each come some steps without any exchange: how fast the machine is changes
        while they train.
        """
        target, slowest, ours = self.job.target, math.inf, 0.0
        null = self.trainer(NULL)
        self._pass_freely(null)
        for name in (DDP, *self.job.contenders):
            tell({"doing": name})
            goal = None if name == DDP else target
            patience = slowest * (EXACT_PATIENCE if name == EXACT else self.job.patience)
            if name == POWERSGD:
                patience = max(patience, HOOK_PATIENCE * ours)
            self.most_seconds = min(self.job.most_seconds, max(LEAST_SECONDS, patience))
            found = self.train(name, goal)
            if target is None:
                _, slowest, target = found["curve"][-1]
            if name == OUR_POWERSGD:
                _, ours, _ = found["curve"][-1]
            tell({"contender": name, "target": target, **found})
            self._pass_freely(null)
            tell({"null_seconds": median(self.free), "data": self.data.source})

    def _pass_freely(self, null: Trainer) -> None:
        """Time steps without any exchange, all workers at once, once they are warm."""
        for _ in range(WARM_UP_STEPS):
            null.step()
        self.free.append(self._span(null, NULL_STEPS) / NULL_STEPS)

    def train(self, name: str, goal: float | None) -> dict[str, Any]:
        """One contender, until it reaches the goal; without one, for the steps of the job."""
        trainer, smooth = self.trainer(name), Smooth()
        self._have_links(training=True)
        last = self.job.steps if goal is None else round(self.job.steps * self.job.most_steps)
        seconds, steps = 0.0, 0
        device, before = sockets.device_nbytes(), sockets.counts()
        curve = [(0, 0.0, smooth(0, self._loss(trainer)))]
        while steps < last and seconds < self.most_seconds:
            if goal is not None and reaches(curve[-1][2], goal):
                break
            count = self._stride(name, steps)
            if period(name) == 1:
                count = min(count, last - steps)
            seconds += self._span(trainer, count)
            steps += count
            curve.append((steps, seconds, smooth(steps, self._loss(trainer))))
        sent = mean(sockets.since(before) / max(1, steps))
        device_sent = mean((sockets.device_nbytes() - device) / max(1, steps))
        self._have_links(training=False)
        trainer.close()
        reached = goal is not None and reaches(curve[-1][2], goal)
        return {"curve": curve, "reached": reached, "nbytes": sent, "device_nbytes": device_sent}

    def _have_links(self, *, training: bool) -> None:
        """As fast as the job has them then, if it says."""
        if self.job.rates:
            ask_for_rate(self.job.rates[training], self.path)

    def _stride(self, name: str, steps: int) -> int:
        """Steps until the next look at the loss, at which all workers have one model."""
        every = self.job.every * (1 if 2 * steps >= self.job.steps else 2)
        return period(name) * -(-every // period(name))

    def trainer(self, name: str) -> Trainer:
        """A contender with a model of its own, as at the start."""
        gc.collect()
        self.task = make(self.workload, self.data, seed=self.job.seed, rank=self.rank)
        return build(name, self.task)

    def _span(self, trainer: Trainer, steps: int) -> float:
        """Seconds that the slowest worker takes for so many steps."""
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            trainer.step()
        trainer.settle()
        return most(time.perf_counter() - begin)

    @torch.no_grad()
    def _loss(self, trainer: Trainer) -> float:
        """Of the common model on the held-out samples."""
        x, y = self.held_out
        model = self.task.model.eval()
        found = float(loss(model(x), y))
        model.train()
        return mean(found)


def count(job: Job, path: Path) -> None:
    """Some steps of each contender, only to see what they send; the first does not count."""
    race = Race(job, path)
    for name in job.contenders:
        tell({"doing": name})
        trainer = race.trainer(name)
        trainer.step()
        trainer.settle()
        dist.barrier()
        device, before = sockets.device_nbytes(), sockets.counts()
        for _ in range(job.steps):
            trainer.step()
        trainer.settle()
        dist.barrier()
        sent = mean(sockets.since(before) / job.steps)
        device_sent = mean((sockets.device_nbytes() - device) / job.steps)
        trainer.close()
        tell({"counted": name, "nbytes": sent, "device_nbytes": device_sent})


def main(path: Path) -> int:
    """Do the job of a file; what goes wrong is written beside it."""
    torch.set_num_threads(1)
    logging.getLogger("shoal").addHandler(logging.NullHandler())  # the bench speaks, not workers
    told: dict[str, Any] = json.loads(path.read_text())
    try:
        dist.init_process_group("gloo", timeout=TIMEOUT)
        do(told, path)
        dist.barrier()
    except BaseException:
        path.with_name(f"error-{os.environ['RANK']}").write_text(traceback.format_exc())
        return 1
    finally:
        sys.stdout.flush()
    return 0


def do(told: dict[str, Any], path: Path) -> None:
    """A job of any kind."""
    from shoal.bench.exchange import cut, duel

    kind = told.pop("kind", "race")
    if kind == "cut":
        cut.run(cut.Cut(**told), path)
        return
    told["contenders"] = tuple(told["contenders"])
    if kind == "duel":
        duel.run(duel.Duel(**told))
    elif kind == "count":
        count(Job(**told), path)
    else:
        Race(Job(**told), path).run()


if __name__ == "__main__":
    os._exit(main(Path(sys.argv[1])))  # peers are done: do not wait for threads of a process group
