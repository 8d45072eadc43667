"""Lossless schedules against DDP's buckets: step times, all contenders taking turns.

A schedule can only win where there is something to overlap, so compute alone and communication
alone are measured too, in the same workers.

1. All contenders warm up: schedules that measure make their plans.
2. A few blocks of all contenders show which fixed schedule is best, and which of those that plan.
3. These, adaptive and DDP are timed in more blocks, whose order is reversed from one to the next;
   so is a twin of the best fixed one, the A/A control of ``statistics``. Of adaptive and the other
   schedule that plans, a third of the blocks selects the better one, and the other blocks compare
   it with DDP.

A step is timed as it is in a long training: after one that is not timed, and to its own end, not to
the end of messages for which the next step may still wait.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.exchange.contenders import ADAPTIVE, DDP, NULL, Trainer, build, nothing
from benchmarks.exchange.progress import DOING, max_over_ranks, write_line
from benchmarks.exchange.workloads import WORKLOADS, make
from shoal.bench.report import Result, Threshold
from shoal.bench.statistics import Estimate, estimate, lenient_verdict, paired_ratios
from shoal.errors import BadArgument

ALONE, TWIN = "communication alone", "twin"
PLANNED = re.compile("merged|priority")
BUCKET_NUMEL = 25 * 2**20 // 4
FASTER, CLOSE = "<= 0.8696", "<= 1.03"
SHARES = (0.3, 0.7)
WARM_UP, PLANNED_WARM_UP = 4, 17  # steps: schedules that plan have done so by the fifteenth
Times = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class ScheduleComparison:
    """What to time.

    Attributes:
        workload: name of the model and its data.
        contenders: strategies, among them adaptive and one that plans; DDP, no exchange and
            communication alone are added.
        tries: blocks of all contenders.
        blocks: of those in the verdicts; at least eighteen, because two thirds of them, which
            compare the best with DDP, must be twelve to give an interval.
        steps: in one timing.
        warm_up: steps of adaptive, after which it has decided; others need fewer.
        seed: of parameters and samples.
    """

    workload: str
    contenders: tuple[str, ...]
    tries: int = 2
    blocks: int = 18
    steps: int = 2
    warm_up: int = 52
    seed: int = 0

    def __post_init__(self) -> None:
        if ADAPTIVE not in self.contenders or not any(map(PLANNED.search, self.contenders)):
            raise BadArgument(
                f"ScheduleComparison({', '.join(self.contenders)})",
                f"needs {ADAPTIVE} and merged or priority",
            )


def run(plan: ScheduleComparison) -> None:
    """Time all contenders in a worker, and write the times."""
    workload = WORKLOADS[plan.workload]
    data, rank = workload.data(), dist.get_rank()

    def trainer(name: str) -> Trainer:
        return build(name, make(workload, data, seed=plan.seed, rank=rank))

    trainers = {name: trainer(name) for name in (NULL, DDP, *plan.contenders)}
    for name in trainers:
        _warm_up(name, trainers[name], plan)
    trainers[ALONE] = _exchanger(sum(p.numel() for p in workload.model().parameters()))
    tried = _time(trainers, plan.tries, plan.steps)
    best, planned = choose(tried)
    trainers[TWIN] = trainer(best)
    _warm_up(best, trainers[TWIN], plan)
    final = dict.fromkeys((ADAPTIVE, best, TWIN, *planned, DDP))
    timed = _time({name: trainers[name] for name in final}, plan.blocks, plan.steps)
    for each in trainers.values():
        each.close()
    write_line({"tried": tried, "timed": timed})


def choose(tried: Times) -> tuple[str, list[str]]:
    """Return the best fixed schedule; and adaptive with the best fixed one of those that plan."""
    medians = {name: median(tried[name]) for name in _ours(tried) if name != ADAPTIVE}
    fixed = sorted(medians, key=medians.__getitem__)
    planned = [name for name in fixed if PLANNED.search(name)]
    return fixed[0], [ADAPTIVE, *planned[:1]]


def _ours(times: Times) -> list[str]:
    return [name for name in times if name not in (DDP, NULL, ALONE, TWIN)]


def _warm_up(name: str, trainer: Trainer, plan: ScheduleComparison) -> None:
    write_line({DOING: f"warming up {name}"})
    planned = PLANNED_WARM_UP if PLANNED.search(name) else WARM_UP
    steps = plan.warm_up if name == ADAPTIVE else planned
    for _ in range(steps):
        trainer.step()
    trainer.settle()


def _time(trainers: Mapping[str, Trainer], blocks: int, steps: int) -> dict[str, list[float]]:
    """Return seconds of a step of the slowest worker, block by block."""
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    gc.collect()
    for block in range(blocks):
        write_line({DOING: f"{len(trainers)} schedules, block {block + 1} of {blocks}"})
        for name in list(trainers) if block % 2 == 0 else list(trainers)[::-1]:
            dist.barrier()
            trainers[name].step()  # not timed: a step usually follows another
            begin = time.perf_counter()
            for _ in range(steps):
                trainers[name].step()
            duration = time.perf_counter() - begin
            trainers[name].settle()
            seconds[name].append(max_over_ranks(duration / steps))
    return seconds


def _exchanger(numel: int) -> Trainer:
    """Return a trainer that only sends as many numbers as a model has, in DDP's buckets."""
    sizes = [min(BUCKET_NUMEL, numel - at) for at in range(0, numel, BUCKET_NUMEL)]
    buckets = [torch.zeros(size) for size in sizes]

    def exchange() -> None:
        for bucket in buckets:
            dist.all_reduce(bucket)

    return Trainer(exchange, nothing, nothing)


def judge(case: str, message: Mapping[str, Any]) -> Iterable[Result]:
    """Yield the rows of all contenders, then the verdicts. Pure."""
    tried, timed = message["tried"], message["timed"]
    medians = {name: median(values) for name, values in {**tried, **timed}.items()}
    share = medians[ALONE] / (medians[ALONE] + medians[NULL])
    yield Result(case, "communication / (compute + communication)", share, "")
    for name in _ours(tried):
        value = medians[name]
        yield Result(f"{case}: {name}", "step time", value * 1e3, "ms", DDP, value / medians[DDP])
    best, planned = choose(tried)
    control = _ratio(timed, TWIN, best)
    yield _row(f"{case}: {best}, again", medians[TWIN], best, control)
    # The blocks that select the better one do not judge it, or the verdict would favour luck.
    selecting = len(timed[DDP]) // 6 * 2
    first = min(planned, key=lambda name: median([*tried[name], *timed[name][:selecting]]))
    ratio = _ratio({name: timed[name][selecting:] for name in (first, DDP)}, first, DDP)
    faster = _row(f"{case}: best, {first}", medians[first], DDP, ratio)
    if SHARES[0] <= share <= SHARES[1]:
        yield _with_verdict(faster, FASTER, ratio, control)
    else:
        yield replace(faster, metric="step time, lossless, not judged: little to overlap")
    ratio = _ratio(timed, ADAPTIVE, best)
    close = _row(f"{case}: {ADAPTIVE}", medians[ADAPTIVE], best, ratio)
    yield _with_verdict(close, CLOSE, ratio, control)


def _ratio(times: Times, name: str, peer: str) -> Estimate:
    return estimate(paired_ratios(times[name], times[peer]))


def _row(case: str, seconds: float, peer: str, ratio: Estimate) -> Result:
    metric = "step time, lossless"
    return Result(case, metric, seconds * 1e3, "ms", peer, ratio.value, ratio.interval)


def _with_verdict(row: Result, threshold: str, ratio: Estimate, control: Estimate) -> Result:
    passes = lenient_verdict(Threshold.parse(threshold), ratio, control)
    return replace(row, threshold=threshold, passes=passes)
