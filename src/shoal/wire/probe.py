"""Measure a network together: how long a message takes, and the backend's own all-reduce, by size.

A message is timed by what carries it later: one leg of a route, in which everybody sends to the
right, receives from the left and adds up. So its price holds the cost of the code as well. At each
size the slowest rank's median counts, and is agreed: all ranks hold the same curves, bit by bit.

Whole routes are timed, too (:func:`race`), and agreed alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.wire.route import Leg, run_legs

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20)
_REPEATS = 7
_TURNS, _FAIR = 25, 3  # at most; before anybody is dropped
_BEHIND = 1.5  # times the best's least: whoever takes longer need not run again
_PATIENCE, _MOST = 1.5, 6.0  # seconds: enough when all had their fair turns; enough anyway
_FLOAT_NBYTES = 4

Group = dist.ProcessGroup | None
Call = Callable[[], object]


class Curve(NamedTuple):
    """Seconds by nbytes: straight between measured points, and never falling.

    >>> Curve(((1000, 1.0), (2000, 3.0))).cost(1500)
    2.0
    """

    points: tuple[tuple[float, float], ...]

    def cost(self, nbytes: float) -> float:
        """Seconds of so many bytes; above the largest measured, at the mean slope."""
        (first, least), (last, most) = self.points[0], self.points[-1]
        if nbytes <= first:
            return least
        if nbytes >= last:
            return most + (most - least) / (last - first) * (nbytes - last)
        for (low, below), (high, above) in pairwise(self.points):
            if nbytes <= high:
                return below + (above - below) * (nbytes - low) / (high - low)
        return most


def rising(sizes: tuple[int, ...], seconds: list[float]) -> Curve:
    """The curve through these points, with none under the one before it: that would be noise."""
    points: list[tuple[float, float]] = []
    for nbytes, taken in zip(sizes, seconds, strict=True):
        points.append((nbytes, max(taken, points[-1][1] if points else 0.0)))
    return Curve(tuple(points))


def probe(
    group: Group, device: torch.device, *, sizes: tuple[int, ...] = SIZES
) -> tuple[Curve, Curve]:
    """The curves of one message and of the backend's all-reduce; every rank calls it at once.

    Args:
        group: the ranks taking part, two at least.
        device: where messages lie.
        sizes: in bytes, rising.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    passing = Leg({(rank + 1) % world: [0]}, {(rank - 1) % world: [(0, True)]})
    calls: list[Call] = []
    for nbytes in sizes:
        flat = blank(nbytes, device)
        calls.append(partial(run_legs, flat, (passing,), chunks=1, group=group))
        calls.append(partial(dist.all_reduce, flat, group=group))
    medians = torch.tensor(_medians(calls, device), device=device)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX, group=group)
    message, native = _columns(medians)
    return rising(sizes, message), rising(sizes, native)


def blank(nbytes: int, device: torch.device) -> Tensor:
    """A message to be timed: zeros stay zeros, however often they are summed."""
    return torch.zeros(max(1, nbytes // _FLOAT_NBYTES), device=device)


def in_a_row(nbytes: int, most: int = 8) -> int:
    """How many messages of a size make one timing: several, as they come in training, if short.

    >>> [in_a_row(nbytes) for nbytes in (4096, 65536, 2**20)]
    [8, 4, 1]
    """
    return max(1, min(most, (1 << 18) // nbytes))


def _columns(medians: Tensor) -> tuple[list[float], list[float]]:
    listed = medians.view(-1, 2).T.tolist()
    return listed[0], listed[1]


def race(calls: Sequence[Call], group: Group, device: torch.device) -> list[float]:
    """Seconds of each call, in turns; infinite for those that fell behind. Every rank calls it.

    After a turn all know the slowest rank's times, and drop the same calls: after a few turns, and
    where a single one takes long, after the first. Who stays is told apart by medians.

    Args:
        calls: that all ranks of the group take part in.
        group: the ranks.
        device: on which calls work.
    """
    taken: list[list[float]] = [[] for _ in calls]
    running, spent = list(range(len(calls))), 0.0
    for turn in range(1 + _TURNS):
        seconds = torch.zeros(len(calls), device=device, dtype=torch.float64)
        for i in running if turn % 2 else reversed(running):
            dist.barrier(group=group)
            seconds[i] = _seconds(calls[i], device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
        spent += float(seconds.sum())
        if turn == 0 and spent < _PATIENCE:
            continue  # connections, buffers
        for i in running:
            taken[i].append(float(seconds[i]))
        if turn == 0 or turn >= _FAIR:
            least = min(min(taken[i]) for i in running)
            running = [i for i in running if min(taken[i]) <= _BEHIND * least]
        if len(running) == 1 or spent > (_PATIENCE if turn >= _FAIR else _MOST):
            break
    return [statistics.median(taken[i]) if i in running else math.inf for i in range(len(calls))]


def _seconds(call: Call, device: torch.device) -> float:
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _medians(calls: Sequence[Call], device: torch.device) -> list[float]:
    """Seconds of each, taking turns; the first turn is not counted (connections, buffers)."""
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in range(1 + _REPEATS):
        for call, taken in zip(calls, seconds, strict=True):
            lasted = _seconds(call, device)
            if turn:
                taken.append(lasted)
    return [statistics.median(taken) for taken in seconds]
