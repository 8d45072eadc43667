"""A training step of DDP on the shoal backend against the same on gloo, in the same workers."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.bench.blocks import slowest
from shoal.bench.form import Bar, Result
from shoal.bench.statistics import estimate, paired_ratios
from shoal.bench.suites import Settings
from shoal.models import gpt, mlp
from shoal.testing.processes import run_workers

_BLOCKS, _WARM_UP = 20, 3
_BARS = {"mlp of 25 M": "<= 0.75", "small gpt": "<= 1"}


def _mlp() -> tuple[nn.Module, Tensor, Tensor]:
    model = mlp(512, 10, width=2048, layers=7)
    return model, torch.randn(16, 512), torch.randint(10, (16,))


def _gpt() -> tuple[nn.Module, Tensor, Tensor]:
    text = torch.randint(256, (4, 65))
    return gpt(256, 64, layers=4, width=192), text[:, :-1], text[:, 1:]


_MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "mlp of 25 M": _mlp,
    "small gpt": _gpt,
}


def steps(settings: Settings) -> Iterator[Result]:
    """One row a model."""
    for done, (name, bar) in enumerate(_BARS.items()):
        settings.progress(f"DDP: {name}", done, len(_BARS))
        workers = run_workers(2, time_steps, name, _BLOCKS, seconds=600)
        ours, gloo = (slowest([worker[kind] for worker in workers]) for kind in range(2))
        ratio = estimate(paired_ratios(ours, gloo))
        yield Result(
            f"{name}, 2 workers",
            "step time of DDP",
            1e3 * median(ours),
            "ms",
            "DDP on gloo",
            ratio.value,
            ratio.interval,
            bar,
            Bar.parse(bar).met(ratio.value),
        )


def time_steps(name: str, blocks: int) -> list[list[float]]:
    """What a worker does: seconds a step on shoal, and on gloo."""
    from shoal.wire.shm import register

    register()
    dist.init_process_group("shoal")
    contenders = [_contender(name, group) for group in (None, dist.new_group(backend="gloo"))]
    for step in contenders * _WARM_UP:
        step()
    seconds: list[list[float]] = [[], []]
    for block in range(blocks):
        for which in (0, 1) if block % 2 == 0 else (1, 0):
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
