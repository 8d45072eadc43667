"""Lossless schedules against DDP's buckets: step times, all contenders taking turns.

Schedules can only win where there is something to overlap, so compute alone and communication alone
are measured too, in the same workers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from shoal.bench.exchange.contenders import DDP, NULL, build
from shoal.bench.exchange.tasks import WORKLOADS, make
from shoal.bench.form import Bar, Result

ALONE = "communication alone"
BUCKET_NUMEL = 25 * 2**20 // 4
FASTER, CLOSE = "<= 0.8696", "<= 1.03"
SHARES = (0.3, 0.7)


@dataclass(frozen=True)
class Duel:
    """What to time.

    Attributes:
        workload: name of the model and its data.
        contenders: strategies; DDP, no exchange and communication alone come by themselves.
        blocks: how often each is timed.
        steps: in one timing.
        warm_up: steps of each before, in which schedules that measure make up their mind.
        seed: of parameters and samples.
    """

    workload: str
    contenders: tuple[str, ...]
    blocks: int = 5
    steps: int = 2
    warm_up: int = 8
    seed: int = 0


def run(duel: Duel) -> None:
    """In a worker: time all, and tell what was found."""
    workload = WORKLOADS[duel.workload]
    data, rank = workload.data(), dist.get_rank()
    steps: dict[str, Callable[[], object]] = {}
    closing = []
    for name in (NULL, DDP, *duel.contenders):
        trainer = build(name, make(workload, data, seed=duel.seed, rank=rank))
        steps[name] = _whole(trainer.step, trainer.settle, duel.steps)
        closing.append(trainer.close)
    steps[ALONE] = _exchange(sum(p.numel() for p in workload.model().parameters()), duel.steps)
    for name, step in steps.items():
        _tell(rank, {"doing": f"warming up {name}"})
        for _ in range(-(-duel.warm_up // duel.steps)):
            step()
    seconds = _time(steps, duel, rank)
    for close in closing:
        close()
    _tell(rank, {"seconds": seconds})


def _time(
    steps: Mapping[str, Callable[[], object]], duel: Duel, rank: int
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for block in range(duel.blocks):
        _tell(rank, {"doing": f"schedules, block {block + 1} of {duel.blocks}"})
        order = list(steps) if block % 2 == 0 else list(steps)[::-1]
        for name in order:
            dist.barrier()
            begin = time.perf_counter()
            steps[name]()
            took = torch.tensor((time.perf_counter() - begin) / duel.steps)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            seconds[name].append(float(took))
    return seconds


def _whole(step: Callable[[], object], settle: Callable[[], object], count: int) -> Any:
    """So many steps, to their very end."""

    def several() -> None:
        for _ in range(count):
            step()
        settle()

    return several


def _exchange(numel: int, count: int) -> Callable[[], object]:
    sizes = [min(BUCKET_NUMEL, numel - at) for at in range(0, numel, BUCKET_NUMEL)]
    buckets = [torch.zeros(size) for size in sizes]

    def exchange() -> None:
        for bucket in buckets * count:
            dist.all_reduce(bucket)

    return exchange


def _tell(rank: int, found: Mapping[str, Any]) -> None:
    if rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


def judge(case: str, seconds: Mapping[str, Sequence[float]]) -> Iterable[Result]:
    """Rows of all, then the bars. Pure."""
    usual = {name: median(values) for name, values in seconds.items()}
    share = usual[ALONE] / (usual[ALONE] + usual[NULL])
    yield Result(case, "communication / (compute + communication)", share, "")
    ours = [name for name in usual if name not in (DDP, NULL, ALONE)]
    for name in ours:
        value = usual[name]
        yield Result(f"{case}: {name}", "step time", value * 1e3, "ms", DDP, value / usual[DDP])
    planned = {n: usual[n] for n in ours if any(w in n for w in ("merged", "priority", "adaptive"))}
    if planned and SHARES[0] <= share <= SHARES[1]:
        best = min(planned, key=lambda name: planned[name])
        yield _barred(f"{case}: best, {best}", planned[best], (DDP, usual[DDP]), FASTER)
    fixed = {name: usual[name] for name in ours if "adaptive" not in name}
    for name in (name for name in ours if "adaptive" in name and fixed):
        best = min(fixed, key=lambda name: fixed[name])
        yield _barred(f"{case}: {name}", usual[name], (best, fixed[best]), CLOSE)


def _barred(case: str, value: float, peer: tuple[str, float], bar: str) -> Result:
    name, other = peer
    ratio = value / other
    met = Bar.parse(bar).met(ratio)
    return Result(case, "step time, lossless", value * 1e3, "ms", name, ratio, None, bar, met)
