"""The worker process of ``shoal bench exchange``; run as a module with the path of a job.

A job is one workload and seed, and contenders that train it one after the other in the same
processes. Rank 0 writes a line of JSON for each: the curve of held-out loss against seconds of
training. The time to measure the loss is not counted; a span of steps takes as long as on the
slowest worker.
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

from benchmarks.exchange import link_change, schedules, sockets
from benchmarks.exchange.contenders import (
    DDP,
    EXACT,
    NULL,
    OUR_POWERSGD,
    POWERSGD,
    Trainer,
    build,
    period,
)
from benchmarks.exchange.progress import (
    DOING,
    max_over_ranks,
    mean_over_ranks,
    request_rate,
    write_line,
)
from benchmarks.exchange.results import Smooth, reaches
from benchmarks.exchange.workloads import WORKLOADS, held_out, make
from shoal.bench.contenders import loss

NULL_STEPS, WARM_UP_STEPS = 4, 1
LEAST_SECONDS = 10.0
EXACT_PATIENCE = 1.3  # of DDP's time: the number of steps that exact needs is used in a ratio
HOOK_PATIENCE = 1.55  # of our powersgd's time: enough for the verdict on torch's hook
TIMEOUT = timedelta(minutes=2)  # of one exchange; the slowest takes seconds


@dataclass(frozen=True)
class Job:
    """What to do.

    Attributes:
        workload: name of the model and its data.
        seed: of parameters and samples.
        contenders: those that train, in this order; DDP is always first.
        steps: of DDP; the others train until they reach its loss.
        target: the loss to reach; None: that of DDP.
        every: steps between measurements of the loss; twice as many in the first half.
        most_seconds: limit of the training time of a contender.
        most_steps: limit of its steps, in multiples of ``steps``.
        patience: a contender that takes so many times as long as DDP has lost, and is stopped.
        rates: of the links while a contender is built, and while it trains; none: unchanged.
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


class JobRunner:
    """Trains the contenders of one job in this worker."""

    def __init__(self, job: Job, path: Path) -> None:
        self.job, self.path, self.rank = job, path, dist.get_rank()
        self.most_seconds, self.null_seconds = job.most_seconds, list[float]()
        self.workload = WORKLOADS[job.workload]
        self.data = self.workload.data()
        self.held_out = held_out(self.workload, self.data, self.rank, dist.get_world_size())

    def run(self) -> None:
        """Train all contenders, DDP first: its last loss is the target of the others.

        Before and after each come some steps without any exchange, because the speed of the machine
        changes while they train.
        """
        target, ddp_seconds, our_seconds = self.job.target, math.inf, 0.0
        null = self.trainer(NULL)
        self._time_null(null)
        for name in (DDP, *self.job.contenders):
            write_line({DOING: name})
            goal = None if name == DDP else target
            patience = ddp_seconds * (EXACT_PATIENCE if name == EXACT else self.job.patience)
            if name == POWERSGD:
                patience = max(patience, HOOK_PATIENCE * our_seconds)
            self.most_seconds = min(self.job.most_seconds, max(LEAST_SECONDS, patience))
            outcome = self.train(name, goal)
            if target is None:
                _, ddp_seconds, target = outcome["curve"][-1]
            if name == OUR_POWERSGD:
                _, our_seconds, _ = outcome["curve"][-1]
            write_line({"contender": name, "target": target, **outcome})
            self._time_null(null)
            seconds = median(self.null_seconds)
            write_line({"null_seconds": seconds, "data": self.data.source})

    def _time_null(self, null: Trainer) -> None:
        """Time steps without any exchange, on all workers at once, after warming up."""
        for _ in range(WARM_UP_STEPS):
            null.step()
        self.null_seconds.append(self._span(null, NULL_STEPS) / NULL_STEPS)

    def train(self, name: str, goal: float | None) -> dict[str, Any]:
        """Train one contender to the goal; without one, for the steps of the job."""
        trainer, smooth = self.trainer(name), Smooth()
        self._set_links(training=True)
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
        sent = mean_over_ranks(sockets.since(before) / max(1, steps))
        device_sent = mean_over_ranks((sockets.device_nbytes() - device) / max(1, steps))
        self._set_links(training=False)
        trainer.close()
        reached = goal is not None and reaches(curve[-1][2], goal)
        return {"curve": curve, "reached": reached, "nbytes": sent, "device_nbytes": device_sent}

    def _set_links(self, *, training: bool) -> None:
        """Ask for the rate that the job has for this phase, if it has one."""
        if self.job.rates:
            request_rate(self.job.rates[training], self.path)

    def _stride(self, name: str, steps: int) -> int:
        """Return the steps to the next measurement of the loss, where all models are equal."""
        every = self.job.every * (1 if 2 * steps >= self.job.steps else 2)
        return period(name) * -(-every // period(name))

    def trainer(self, name: str) -> Trainer:
        """Build a contender with a new model."""
        gc.collect()
        self.task = make(self.workload, self.data, seed=self.job.seed, rank=self.rank)
        return build(name, self.task)

    def _span(self, trainer: Trainer, steps: int) -> float:
        """Return the seconds that the slowest worker takes for so many steps."""
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            trainer.step()
        trainer.settle()
        return max_over_ranks(time.perf_counter() - begin)

    @torch.no_grad()
    def _loss(self, trainer: Trainer) -> float:
        """Return the loss of the common model on the held-out samples."""
        x, y = self.held_out
        model = self.task.model.eval()
        value = float(loss(model(x), y))
        model.train()
        return mean_over_ranks(value)


def count(job: Job, path: Path) -> None:
    """Do some steps of each contender to count the bytes it sends; the first is not counted."""
    runner = JobRunner(job, path)
    for name in job.contenders:
        write_line({DOING: name})
        trainer = runner.trainer(name)
        trainer.step()
        trainer.settle()
        dist.barrier()
        device, before = sockets.device_nbytes(), sockets.counts()
        for _ in range(job.steps):
            trainer.step()
        trainer.settle()
        dist.barrier()
        sent = mean_over_ranks(sockets.since(before) / job.steps)
        device_sent = mean_over_ranks((sockets.device_nbytes() - device) / job.steps)
        trainer.close()
        write_line({"counted": name, "nbytes": sent, "device_nbytes": device_sent})


def main(path: Path) -> int:
    """Do the job of a file; write a failure's traceback beside it."""
    torch.set_num_threads(1)
    logging.getLogger("shoal").addHandler(logging.NullHandler())  # only the suite prints
    fields: dict[str, Any] = json.loads(path.read_text())
    try:
        dist.init_process_group("gloo", timeout=TIMEOUT)
        run(fields, path)
        dist.barrier()
    except BaseException:
        path.with_name(f"error-{os.environ['RANK']}").write_text(traceback.format_exc())
        return 1
    finally:
        sys.stdout.flush()
    return 0


def run(fields: dict[str, Any], path: Path) -> None:
    """Do a job of any kind: train, count, schedules or link_change."""
    kind = fields.pop("kind", "train")
    if kind == "link_change":
        link_change.run(link_change.LinkChange(**fields), path)
        return
    fields["contenders"] = tuple(fields["contenders"])
    if kind == "schedules":
        schedules.run(schedules.ScheduleComparison(**fields))
    elif kind == "count":
        count(Job(**fields), path)
    else:
        JobRunner(Job(**fields), path).run()


if __name__ == "__main__":
    os._exit(main(Path(sys.argv[1])))  # peers have ended: do not wait for process-group threads
