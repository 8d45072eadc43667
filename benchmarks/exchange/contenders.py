"""The contenders: DDP, DDP with torch's PowerSGD hook, and strategies of Shoal."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from benchmarks.exchange.workloads import ContenderTask
from shoal.bench.contenders import loss
from shoal.strategy import parse

DDP = "DDP"
POWERSGD = "DDP, torch's PowerSGD hook"
NULL = "no exchange"
RANK = 4
EXACT = "all_reduce, bsp, wfbp, exact"
OUR_POWERSGD = f"all_reduce, bsp, wfbp, error_feedback(powersgd({RANK}))"
TOPK = "all_reduce, bsp, wfbp, error_feedback(topk(0.01))"
SELDOM = "all_reduce, local(28), fifo, error_feedback(powersgd(32))"
CARRIED_ON = f"bmuf, local(9), fifo, error_feedback(powersgd({RANK}))"
OFTENER = "all_reduce, local(10), fifo, error_feedback(powersgd(16))"
ADAPTIVE = "all_reduce, bsp, adaptive, exact"

STRATEGIES = (
    OUR_POWERSGD,
    SELDOM,
    OFTENER,
    CARRIED_ON,
)
"""Compared by time to DDP's loss. To try another one, add its line."""

SLOW_STRATEGIES = (OUR_POWERSGD, SELDOM)
"""Compared on the slow network, where others would take minutes."""

SCHEDULES = (
    "all_reduce, bsp, wfbp(4MB), exact",
    "all_reduce, bsp, merged, exact",
    "all_reduce, bsp, priority, exact",
    ADAPTIVE,
)
"""Lossless schedules, compared by step time with DDP's buckets."""

COUNTED = tuple(
    f"all_reduce, bsp, wfbp, {compressor}"
    for compressor in (
        "cast(bfloat16)",
        "qsgd(16)",
        "terngrad",
        "onebit",
        "twobit(0.01)",
        "sign",
        "natural",
        "int8",
        "topk(0.01)",
        "random_k(0.01)",
        "gtopk(0.01)",
        "sufficient_factors",
    )
)
"""Techniques whose bytes have a formula; the bytes of others depend on the data."""

ONE_BUCKET_MB = 4096  # on gloo torch's hook hangs with two buckets or more


@dataclass(frozen=True)
class Trainer:
    """A contender with its task.

    Attributes:
        step: does one training step.
        settle: waits until the model may be read.
        close: releases hooks and threads.
    """

    step: Callable[[], object]
    settle: Callable[[], object]
    close: Callable[[], object]


def period(name: str) -> int:
    """Return the steps between exchanges; only after one do all workers have equal parameters."""
    return 1 if name in (DDP, POWERSGD, NULL) else parse(name).synchrony.period


def build(name: str, task: ContenderTask) -> Trainer:
    """Build a contender by its name: a peer, or else a strategy."""
    if name == NULL:
        return _loop(task, task.model)
    if name == DDP:
        return _loop(task, _ddp(task.model, None))
    return _powersgd(task) if name == POWERSGD else _shoal(task, name)


def _powersgd(task: ContenderTask) -> Trainer:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

    wrapped = _ddp(task.model, ONE_BUCKET_MB)
    state = hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, hook.powerSGD_hook)
    return _loop(task, wrapped)


def _ddp(model: nn.Module, bucket_mb: int | None) -> nn.parallel.DistributedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch is renaming broadcast_buffers
        return nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
        )


def _loop(task: ContenderTask, forward: nn.Module) -> Trainer:
    def step() -> None:
        x, y = next(task.batches)
        loss(forward(x), y).backward()  # type: ignore[no-untyped-call]
        task.optimizer.step()
        task.optimizer.zero_grad()

    return Trainer(step, nothing, nothing)


def _shoal(task: ContenderTask, strategy: str) -> Trainer:
    import shoal

    run = shoal.distribute(task.model, task.optimizer, loss=loss, strategy=strategy, timeline=False)
    return Trainer(lambda: run.step(next(task.batches)), run.drain, run.close)


def nothing() -> None:
    """Do nothing: a step of DDP leaves nothing to wait for or to release."""
