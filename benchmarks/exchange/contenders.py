"""Who takes part: DDP, DDP with torch's PowerSGD hook, and strategies of Shoal. A list, as data."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from shoal.bench.contenders import loss
from shoal.bench.exchange.tasks import Task
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
"""Compared by time to DDP's loss. To try another, add its line."""

SLOW_STRATEGIES = (OUR_POWERSGD, SELDOM)
"""The same where the network is so slow that others would take minutes."""

SCHEDULES = (
    "all_reduce, bsp, wfbp(4MB), exact",
    "all_reduce, bsp, merged, exact",
    "all_reduce, bsp, priority, exact",
    ADAPTIVE,
)
"""Lossless ones, compared by step time with DDP's buckets."""

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
"""Techniques whose bytes have a formula; those of the others depend on the data."""

ONE_BUCKET_MB = 4096  # on gloo torch's hook hangs with two buckets or more


@dataclass(frozen=True)
class Trainer:
    """A contender at work on its task.

    Attributes:
        step: one training step.
        settle: waits until the model may be read.
        close: lets go of hooks and threads.
    """

    step: Callable[[], object]
    settle: Callable[[], object]
    close: Callable[[], object]


def period(name: str) -> int:
    """Steps between exchanges: only then do all workers have the same parameters."""
    return 1 if name in (DDP, POWERSGD, NULL) else parse(name).synchrony.period


def build(name: str, task: Task) -> Trainer:
    """A contender, by name; what is no name of a peer is a strategy."""
    peers = {DDP: _ddp, POWERSGD: _powersgd, NULL: _null}
    return peers[name](task) if name in peers else _shoal(task, name)


def _null(task: Task) -> Trainer:
    return _loop(task, task.model)


def _ddp(task: Task) -> Trainer:
    return _loop(task, _wrapped(task.model, None))


def _powersgd(task: Task) -> Trainer:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

    wrapped = _wrapped(task.model, ONE_BUCKET_MB)
    state = hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, hook.powerSGD_hook)
    return _loop(task, wrapped)


def _wrapped(model: nn.Module, bucket_mb: int | None) -> nn.parallel.DistributedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch is renaming broadcast_buffers
        return nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
        )


def _loop(task: Task, forward: nn.Module) -> Trainer:
    def step() -> None:
        x, y = next(task.batches)
        loss(forward(x), y).backward()  # type: ignore[no-untyped-call]
        task.optimizer.step()
        task.optimizer.zero_grad()

    return Trainer(step, nothing, nothing)


def _shoal(task: Task, strategy: str) -> Trainer:
    import shoal

    run = shoal.distribute(task.model, task.optimizer, loss=loss, strategy=strategy, timeline=False)
    return Trainer(lambda: run.step(next(task.batches)), run.drain, run.close)


def nothing() -> None:
    """What is left to do where a step ends when all is done."""
