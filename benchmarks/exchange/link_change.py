"""Does an adaptive schedule notice that the network became slower, and how soon?

It trains until it has decided on a plan. Then the links are cut to a tenth of their rate between
two steps, and the steps are counted until it decides again, from messages timed on the new links.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.exchange.contenders import ADAPTIVE, build
from benchmarks.exchange.progress import DOING, request_rate, write_line
from benchmarks.exchange.workloads import WORKLOADS, make
from shoal.bench.report import Result, Threshold

THRESHOLD = "<= 20"
REPLANNED = "messages take"  # begins the reason of a decision that follows a change of the links


@dataclass(frozen=True)
class LinkChange:
    """What to train, and when the links become slower.

    Attributes:
        rate: of the links after the change.
        workload: name of the model and its data; small, because steps become ten times as long.
        strategy: one whose schedule measures.
        before: steps before the change: the schedule decides by the 50th, then measures its plan.
        after: steps after the change.
        seed: of parameters and samples.
    """

    rate: str
    workload: str = "mlp, narrow"
    strategy: str = ADAPTIVE
    before: int = 61
    after: int = 22
    seed: int = 0


class DecisionLog(logging.Handler):
    """Collects the decisions that a schedule logs, with their steps; only rank 0 logs them."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.step = 0
        self.decisions: list[tuple[int, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Store the decision."""
        if isinstance(record.args, tuple) and len(record.args) == 4:
            _, plan, how, why = map(str, record.args)
            self.decisions.append((self.step, why, f"{plan} ({how})"))


def run(plan: LinkChange, path: Path) -> None:
    """Train in a worker, ask for slower links, train on; rank 0 writes every decision."""
    workload = WORKLOADS[plan.workload]
    task = make(workload, workload.data(), seed=plan.seed, rank=dist.get_rank())
    trainer, log = build(plan.strategy, task), DecisionLog()
    logger = logging.getLogger("shoal")
    logger.setLevel(logging.INFO)
    logger.addHandler(log)
    for step in range(plan.before + plan.after):
        log.step = step
        if step == plan.before:
            trainer.settle()
            request_rate(plan.rate, path)
        if step % 4 == 0:
            write_line({DOING: f"step {step} of an adaptive schedule"})
        trainer.step()
    trainer.settle()
    trainer.close()
    write_line({"decisions": log.decisions, "changed": plan.before})


def judge(case: str, message: Mapping[str, Any]) -> Iterable[Result]:
    """Yield the plan before the change, and the steps from it to the next decision. Pure."""
    decisions: Sequence[Sequence[Any]] = message["decisions"]
    changed = int(message["changed"])
    before = [each for each in decisions if each[0] < changed]
    for step, why, plan in before[-1:]:
        yield Result(f"{case}: {plan}; {why}", "decided in step", step, "")
    after = [each for each in decisions if each[0] >= changed]
    replanned = [each for each in after if str(each[1]).startswith(REPLANNED)]
    metric = "steps until it decides anew"
    if not replanned:
        yield Result(f"{case}: it did not", metric, 1e4, "", threshold=THRESHOLD, passes=False)
        return
    step, why, plan = replanned[0]
    steps = int(step) - changed
    passes = Threshold.parse(THRESHOLD).met(steps)
    yield Result(f"{case}: {plan}; {why}", metric, steps, "", threshold=THRESHOLD, passes=passes)
