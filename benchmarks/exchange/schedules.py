"""Lossless schedules against DDP's buckets: step times, all contenders taking turns.

Schedules can only win where there is something to overlap, so compute alone and communication alone
are measured too, in the same workers.

1. All are warmed up: schedules that measure make up their mind.
2. A few blocks of all tell which fixed schedule is best, and which of those that plan.
3. These, adaptive and DDP are timed in more blocks, whose orders are reversed from one to the next;
   so is a twin of the best fixed one, the A/A control of ``statistics``. Of adaptive and the other
   that plans, a third of the blocks tells the better one, and the others hold it against DDP.

A step is timed as it is in a long training: after one that is not timed, and to its own end, not to
that of messages which the next one may still await.
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

from shoal.bench.exchange.contenders import ADAPTIVE, DDP, NULL, Trainer, build, nothing
from shoal.bench.exchange.tasks import WORKLOADS, make
from shoal.bench.exchange.telling import DOING, most, tell
from shoal.bench.form import Bar, Result
from shoal.bench.statistics import Estimate, estimate, judged, paired_ratios
from shoal.errors import BadArgument

ALONE, TWIN = "communication alone", "twin"
PLANNED = re.compile("merged|priority")
BUCKET_NUMEL = 25 * 2**20 // 4
FASTER, CLOSE = "<= 0.8696", "<= 1.03"
SHARES = (0.3, 0.7)
WARM_UP, PLANNED_WARM_UP = 4, 17  # steps: what plans by itself has done so by the fifteenth
Times = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Duel:
    """What to time.

    Attributes:
        workload: name of the model and its data.
        contenders: strategies, adaptive among them, and one that plans; DDP, no exchange and
            communication alone come by themselves.
        tries: blocks of all.
        blocks: of those who are judged, eighteen at least: two thirds, which hold the best against
            DDP, must be twelve to give an interval.
        steps: in one timing.
        warm_up: steps of adaptive, by which it has decided; others need fewer.
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
                f"Duel({', '.join(self.contenders)})", f"needs {ADAPTIVE} and merged or priority"
            )


def run(duel: Duel) -> None:
    """In a worker: time all, and tell what was found."""
    workload = WORKLOADS[duel.workload]
    data, rank = workload.data(), dist.get_rank()

    def made(name: str) -> Trainer:
        return build(name, make(workload, data, seed=duel.seed, rank=rank))

    trainers = {name: made(name) for name in (NULL, DDP, *duel.contenders)}
    for name in trainers:
        _warm_up(name, trainers[name], duel)
    trainers[ALONE] = _exchanger(sum(p.numel() for p in workload.model().parameters()))
    tried = _time(trainers, duel.tries, duel.steps)
    best, planned = chosen(tried)
    trainers[TWIN] = made(best)
    _warm_up(best, trainers[TWIN], duel)
    final = dict.fromkeys((ADAPTIVE, best, TWIN, *planned, DDP))
    timed = _time({name: trainers[name] for name in final}, duel.blocks, duel.steps)
    for trainer in trainers.values():
        trainer.close()
    tell({"tried": tried, "timed": timed})


def chosen(tried: Times) -> tuple[str, list[str]]:
    """The best fixed schedule; adaptive, and the best fixed one of those that plan."""
    usual = {name: median(tried[name]) for name in _ours(tried) if name != ADAPTIVE}
    fixed = sorted(usual, key=usual.__getitem__)
    planned = [name for name in fixed if PLANNED.search(name)]
    return fixed[0], [ADAPTIVE, *planned[:1]]


def _ours(times: Times) -> list[str]:
    return [name for name in times if name not in (DDP, NULL, ALONE, TWIN)]


def _warm_up(name: str, trainer: Trainer, duel: Duel) -> None:
    tell({DOING: f"warming up {name}"})
    planned = PLANNED_WARM_UP if PLANNED.search(name) else WARM_UP
    steps = duel.warm_up if name == ADAPTIVE else planned
    for _ in range(steps):
        trainer.step()
    trainer.settle()


def _time(trainers: Mapping[str, Trainer], blocks: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step, block by block; the slowest worker's."""
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    gc.collect()
    for block in range(blocks):
        tell({DOING: f"{len(trainers)} schedules, block {block + 1} of {blocks}"})
        for name in list(trainers) if block % 2 == 0 else list(trainers)[::-1]:
            dist.barrier()
            taken = _seconds(trainers[name], steps)
            seconds[name].append(most(taken / steps))
    return seconds


def _seconds(trainer: Trainer, steps: int) -> float:
    """Of some steps that follow another."""
    trainer.step()
    begin = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    taken = time.perf_counter() - begin
    trainer.settle()
    return taken


def _exchanger(numel: int) -> Trainer:
    """Only sends, as many numbers as a model has, in DDP's buckets."""
    sizes = [min(BUCKET_NUMEL, numel - at) for at in range(0, numel, BUCKET_NUMEL)]
    buckets = [torch.zeros(size) for size in sizes]

    def exchange() -> None:
        for bucket in buckets:
            dist.all_reduce(bucket)

    return Trainer(exchange, nothing, nothing)


def judge(case: str, found: Mapping[str, Any]) -> Iterable[Result]:
    """Rows of all, then the bars. Pure."""
    tried, timed = found["tried"], found["timed"]
    usual = {name: median(values) for name, values in {**tried, **timed}.items()}
    share = usual[ALONE] / (usual[ALONE] + usual[NULL])
    yield Result(case, "communication / (compute + communication)", share, "")
    for name in _ours(tried):
        value = usual[name]
        yield Result(f"{case}: {name}", "step time", value * 1e3, "ms", DDP, value / usual[DDP])
    best, planned = chosen(tried)
    control = _ratio(timed, TWIN, best)
    yield _row(f"{case}: {best}, again", usual[TWIN], best, control)
    choosing = len(timed[DDP]) // 6 * 2  # as many as are not judged: none is chosen by its luck
    first = min(planned, key=lambda name: median([*tried[name], *timed[name][:choosing]]))
    ratio = _ratio({name: timed[name][choosing:] for name in (first, DDP)}, first, DDP)
    faster = _row(f"{case}: best, {first}", usual[first], DDP, ratio)
    if SHARES[0] <= share <= SHARES[1]:
        yield _barred(faster, FASTER, ratio, control)
    else:
        yield replace(faster, metric="step time, lossless, not judged: little to overlap")
    ratio = _ratio(timed, ADAPTIVE, best)
    close = _row(f"{case}: {ADAPTIVE}", usual[ADAPTIVE], best, ratio)
    yield _barred(close, CLOSE, ratio, control)


def _ratio(times: Times, name: str, peer: str) -> Estimate:
    return estimate(paired_ratios(times[name], times[peer]))


def _row(case: str, seconds: float, peer: str, ratio: Estimate) -> Result:
    told = peer, ratio.value, ratio.interval
    return Result(case, "step time, lossless", seconds * 1e3, "ms", *told)


def _barred(row: Result, bar: str, ratio: Estimate, control: Estimate) -> Result:
    return replace(row, bar=bar, holds=judged(Bar.parse(bar), ratio, control))
