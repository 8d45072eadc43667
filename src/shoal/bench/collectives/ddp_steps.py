"""Time a training step of DDP on the shoal backend against one on gloo, in the same workers."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.bench.blocks import keep_memory
from shoal.bench.report import Result, Threshold
from shoal.bench.statistics import ORDERS, Estimate, Timings, compare, lenient_verdict, slowest
from shoal.bench.suites import BenchSettings
from shoal.models import gpt, mlp
from shoal.testing.processes import run_workers

_BLOCKS, _WARM_UP = 48, 3
_THRESHOLDS = {"mlp of 25 M": "<= 0.75", "small gpt": "<= 1"}


def _mlp() -> tuple[nn.Module, Tensor, Tensor]:
    model = mlp(512, 10, width=2048, layers=7)
    return model, torch.randn(16, 512), torch.randint(10, (16,))


def _gpt() -> tuple[nn.Module, Tensor, Tensor]:
    text = torch.randint(256, (4, 65))
    return gpt(256, 64, layers=4, width=192), text[:, :-1], text[:, 1:]


_MODELS = {"mlp of 25 M": _mlp, "small gpt": _gpt}


def steps(settings: BenchSettings) -> Iterator[Result]:
    """Yield two results for each model: shoal against gloo, and the control, gloo against gloo."""
    for done, (name, threshold) in enumerate(_THRESHOLDS.items()):
        settings.progress(f"DDP: {name}", done, len(_THRESHOLDS))
        workers = run_workers(2, time_steps, name, _BLOCKS, seconds=900)
        timings = Timings(*(slowest(seconds) for seconds in zip(*workers, strict=True)))
        paired, case = compare(timings), f"{name}, 2 workers"
        passes = lenient_verdict(Threshold.parse(threshold), paired.ratio, paired.control)
        row = _row(case, timings.subject, paired.ratio)
        yield replace(row, threshold=threshold, passes=passes)
        yield _row(f"{case}, A/A", timings.twin, paired.control)


def _row(case: str, seconds: Sequence[float], ratio: Estimate) -> Result:
    times = "step time of DDP", 1e3 * median(seconds), "ms"
    return Result(case, *times, "DDP on gloo", ratio.value, ratio.interval)


def time_steps(name: str, blocks: int) -> list[list[float]]:
    """Return the seconds of a step on shoal, on gloo and on a second gloo group, by block."""
    from shoal.wire.shm import register

    keep_memory()
    register()
    dist.init_process_group("shoal")
    groups = (None, dist.new_group(backend="gloo"), dist.new_group(backend="gloo"))
    contenders = [_contender(name, group) for group in groups]
    for step in contenders * _WARM_UP:
        step()
    seconds: list[list[float]] = [[] for _ in contenders]
    for block in range(blocks):
        for which in ORDERS[block % len(ORDERS)]:
            dist.barrier()
            begin = time.perf_counter()
            contenders[which]()
            seconds[which].append(time.perf_counter() - begin)
    return seconds


def _contender(name: str, group: dist.ProcessGroup | None) -> Callable[[], None]:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model, x, y = _MODELS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch is renaming broadcast_buffers
        wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        F.cross_entropy(wrapped(x).flatten(0, -2), y.flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step
