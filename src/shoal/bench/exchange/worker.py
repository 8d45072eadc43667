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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.bench.contenders import loss
from shoal.bench.exchange.contenders import DDP, NULL, Trainer, build, period
from shoal.bench.exchange.judge import Smooth, reaches
from shoal.bench.exchange.tasks import WORKLOADS, held_out, make
from shoal.runtime.launcher.interfaces import IFNAME

NULL_STEPS, WARM_UP_STEPS = 8, 2
PATIENCE, LEAST_SECONDS = 1.3, 10.0  # who takes so many times as long as DDP has lost


@dataclass(frozen=True)
class Job:
    """What to do.

    Attributes:
        workload: name of the model and its data.
        seed: of parameters and samples.
        contenders: who trains, in this order; DDP is always first.
        steps: of DDP; the others have until they reach its loss.
        target: the loss to reach; None: what DDP reaches.
        every: steps between looks at the loss.
        most_seconds: nobody trains longer.
        most_steps: nor further, in multiples of ``steps``.
    """

    workload: str
    seed: int
    contenders: tuple[str, ...]
    steps: int
    target: float | None = None
    every: int = 4
    most_seconds: float = 120.0
    most_steps: float = 3.0


class Race:
    """Contenders of one job in this worker."""

    def __init__(self, job: Job) -> None:
        self.job, self.rank = job, dist.get_rank()
        self.most_seconds = job.most_seconds
        self.workload = WORKLOADS[job.workload]
        self.data = self.workload.data()
        self.held_out = held_out(self.workload, self.data, self.rank, dist.get_world_size())

    def run(self) -> None:
        """All of them, DDP first: its last loss is what the others are to reach."""
        self._tell({"null_seconds": self.null(), "data": self.data.source})
        target = self.job.target
        for name in (DDP, *self.job.contenders):
            self._tell({"doing": name})
            goal = None if name == DDP else target
            found = self.train(name, goal)
            if target is None:
                _, seconds, target = found["curve"][-1]
                patience = max(LEAST_SECONDS, PATIENCE * seconds)
                self.most_seconds = min(self.most_seconds, patience)
            self._tell({"contender": name, "target": target, **found})

    def null(self) -> float:
        """Seconds of a step without any exchange, all workers at once; also warms up."""
        trainer = self._trainer(NULL)
        for _ in range(WARM_UP_STEPS):
            trainer.step()
        dist.barrier()
        return self._span(trainer, NULL_STEPS) / NULL_STEPS

    def train(self, name: str, goal: float | None) -> dict[str, Any]:
        """One contender, until it reaches the goal; without one, for the steps of the job."""
        trainer, smooth = self._trainer(name), Smooth()
        stride = math.lcm(self.job.every, period(name)) if period(name) > 1 else self.job.every
        most = self.job.steps if goal is None else round(self.job.steps * self.job.most_steps)
        seconds, steps, before = 0.0, 0, sent_nbytes()
        curve = [(0, 0.0, smooth(0, self._loss(trainer)))]
        while steps < most and seconds < self.most_seconds:
            if goal is not None and reaches(curve[-1][2], goal):
                break
            count = min(stride, most - steps) if period(name) == 1 else stride
            seconds += self._span(trainer, count)
            steps += count
            curve.append((steps, seconds, smooth(steps, self._loss(trainer))))
        # the least of all ranks: one of them hosts the store, which others ask all the time
        sent = float(_agreed((sent_nbytes() - before) / max(1, steps), dist.ReduceOp.MIN))
        trainer.close()
        reached = goal is not None and reaches(curve[-1][2], goal)
        return {"curve": curve, "reached": reached, "nbytes": sent}

    def _trainer(self, name: str) -> Trainer:
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
        return float(_agreed(time.perf_counter() - begin, dist.ReduceOp.MAX))

    @torch.no_grad()
    def _loss(self, trainer: Trainer) -> float:
        """Of the common model on the held-out samples."""
        x, y = self.held_out
        model = self.task.model.eval()
        found = float(loss(model(x), y)) / dist.get_world_size()
        model.train()
        return float(_agreed(found, dist.ReduceOp.SUM))

    def _tell(self, found: dict[str, Any]) -> None:
        if self.rank == 0:
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


def _agreed(value: float, how: Any) -> Tensor:
    told = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(told, op=how)
    return told


def sent_nbytes() -> int:
    """Bytes this host's device has sent since it was made, headers counted."""
    device = os.environ.get(IFNAME, "lo")
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())


def main(path: Path) -> int:
    """Do the job of a file; what goes wrong is written beside it."""
    torch.set_num_threads(1)
    logging.getLogger("shoal").addHandler(logging.NullHandler())  # the bench speaks, not workers
    told: dict[str, Any] = json.loads(path.read_text())
    try:
        dist.init_process_group("gloo")
        kind = told.pop("kind", "race")
        if kind == "duel":
            from shoal.bench.exchange.duel import Duel, run

            run(Duel(**{**told, "contenders": tuple(told["contenders"])}))
        else:
            Race(Job(**{**told, "contenders": tuple(told["contenders"])})).run()
        dist.barrier()
    except BaseException:
        path.with_name(f"error-{os.environ['RANK']}").write_text(traceback.format_exc())
        return 1
    finally:
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    os._exit(main(Path(sys.argv[1])))  # peers are done: do not wait for threads of a process group
