"""Does an adaptive schedule notice that the network became slower, and how soon?

It trains until it has made up its mind. Then the links are cut to a tenth of their rate between two
steps, and the steps are counted until it decides anew, from messages it has timed on the new link.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoal.bench.exchange.contenders import ADAPTIVE, build
from shoal.bench.exchange.links import ask_for_rate
from shoal.bench.exchange.tasks import WORKLOADS, make
from shoal.bench.exchange.telling import DOING, tell
from shoal.bench.form import Bar, Result

BAR = "<= 20"
ANEW = "messages take"  # how a decision begins that was made because the link is another


@dataclass(frozen=True)
class Cut:
    """What to train, and when the links become slower.

    Attributes:
        rate: of the links, afterwards.
        workload: name of the model and its data; small, for steps get ten times as long.
        strategy: one whose schedule measures.
        before: steps until then: it has decided by the 50th, and then learns what is usual.
        after: steps from then on.
        seed: of parameters and samples.
    """

    rate: str
    workload: str = "mlp, narrow"
    strategy: str = ADAPTIVE
    before: int = 61
    after: int = 22
    seed: int = 0


class Decisions(logging.Handler):
    """Hears what a schedule decides, and notes the step: only the first rank's speaks."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.step = 0
        self.heard: list[tuple[int, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note it."""
        if isinstance(record.args, tuple) and len(record.args) == 4:
            _, plan, how, why = map(str, record.args)
            self.heard.append((self.step, why, f"{plan} ({how})"))


def run(wanted: Cut, path: Path) -> None:
    """In a worker: train, ask for slower links, train on; rank 0 tells every decision."""
    workload = WORKLOADS[wanted.workload]
    task = make(workload, workload.data(), seed=wanted.seed, rank=dist.get_rank())
    trainer, decisions = build(wanted.strategy, task), Decisions()
    logger = logging.getLogger("shoal")
    logger.setLevel(logging.INFO)
    logger.addHandler(decisions)
    for step in range(wanted.before + wanted.after):
        decisions.step = step
        if step == wanted.before:
            trainer.settle()
            ask_for_rate(wanted.rate, path)
        if step % 4 == 0:
            tell({DOING: f"step {step} of an adaptive schedule"})
        trainer.step()
    trainer.settle()
    trainer.close()
    tell({"decisions": decisions.heard, "cut": wanted.before})


def judge(case: str, found: Mapping[str, Any]) -> Iterable[Result]:
    """The plan before, and how many steps after the cut another decision was made. Pure."""
    decisions: Sequence[Sequence[Any]] = found["decisions"]
    cut = int(found["cut"])
    before = [each for each in decisions if each[0] < cut]
    for step, why, plan in before[-1:]:
        yield Result(f"{case}: {plan}; {why}", "decided in step", step, "")
    anew = [each for each in decisions if each[0] >= cut and str(each[1]).startswith(ANEW)]
    metric = "steps until it decides anew"
    if not anew:
        yield Result(f"{case}: it did not", metric, 1e4, "", bar=BAR, holds=False)
        return
    step, why, plan = anew[0]
    steps = int(step) - cut
    met = Bar.parse(BAR).met(steps)
    yield Result(f"{case}: {plan}; {why}", metric, steps, "", bar=BAR, holds=met)
