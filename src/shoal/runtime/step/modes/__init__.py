"""What a worker does in a step, chosen by the facts of its strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from shoal import rules
from shoal.axes.compression import Trait
from shoal.axes.compression.kit.stopwatch import Stopwatch
from shoal.runtime.step.buffers import Allocate, FlatBuffers, zeros
from shoal.runtime.step.exchange import Exchange
from shoal.runtime.step.modes.gradient import GradientMode
from shoal.runtime.step.modes.local import LocalMode
from shoal.runtime.step.modes.mixing import MixingMode
from shoal.runtime.step.modes.mode import Apply, Asks, Mode, Parameters
from shoal.runtime.step.modes.pairs import PairsMode
from shoal.runtime.step.modes.push import PushMode
from shoal.runtime.step.stats import REPORT_WIDTH
from shoal.strategy import Strategy

__all__ = ["Apply", "Asks", "Mode", "Parameters", "ReplicaIndex", "choose"]


class ReplicaIndex(NamedTuple):
    """Which worker this is, of how many."""

    worker: int
    workers: int


def _rides(s: Strategy, parameters: Parameters) -> bool:
    """Whether everybody's word on a step may travel behind the last gradients, for free.

    It needs sums of exact numbers, fine enough to count samples, in an order that ends with the
    last task.
    """
    plain = s.coordination.via == "collective" and rules.can_overlap(s) and not s.scheduling.slices
    exact = Trait.LOSSLESS in s.compression.traits and Trait.ELEMENTWISE in s.compression.traits
    kinds = {(p.dtype, p.device) for p in parameters.values()}
    fine = all(dtype in (torch.float32, torch.float64) for dtype, _ in kinds)
    return plain and exact and len(kinds) == 1 and fine


def choose(
    strategy: Strategy,
    parameters: Parameters,
    index: ReplicaIndex,
    collect: Callable[[Exchange], None],
    *,
    allocate: Allocate = zeros,
    stopwatch: Stopwatch | None = None,
) -> Mode:
    """The mode that a strategy's facts ask for.

    Args:
        strategy: what to do.
        parameters: the trainable ones, in forward order.
        index: which worker this is.
        collect: puts the gradients of the last backward into an agreement.
        allocate: where the memory of messages comes from.
        stopwatch: for a compressor that goes by what rounds take; None where no time passes.
    """
    s = strategy
    if not s.synchrony.waits and s.coordination.via != "server":
        row = s.coordination.mixing(index.workers, 0)[index.worker]
        neighbours = [j for j, w in enumerate(row) if w and j != index.worker]
        return PairsMode(parameters, neighbours, seed=f"pairs/{index.worker}")
    tail = REPORT_WIDTH * index.workers if _rides(s, parameters) else 0
    flats = FlatBuffers(parameters, tail=tail, allocate=allocate)
    agreement = Exchange(flats, s.scheduling, s.compression)
    if s.compression.timed:
        agreement.stopwatch = stopwatch
    if rules.sends_gradients(s):
        return GradientMode(agreement)
    if s.synchrony.waits and s.coordination.sends == "parameter":
        return MixingMode(parameters, agreement, s.synchrony.period)
    if s.synchrony.waits:
        momentum, rate, outer = 0.0, 1.0, s.coordination.outer
        if outer is not None and index.workers > 1:  # alone, a step is a step
            momentum, rate = outer.momentum_of(index.workers), outer.rate
        period = s.synchrony.period
        return LocalMode(parameters, agreement, period=period, momentum=momentum, rate=rate)
    return PushMode(parameters, agreement, lambda: collect(agreement))
