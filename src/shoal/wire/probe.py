"""Measure a network: the seconds of a message, of the backend's all-reduce and of whole routes.

A message is timed on the path that carries it later: one leg of a route, in which each rank sends
to its right neighbour, receives from its left and adds up. So its cost includes that of the code.
The slowest rank's median counts, by an all-reduce: all ranks have the same numbers, to the bit.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.tuner import close
from shoal.wire.route import Group, Leg, run_legs

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20)
_REPEATS = 7
_TURNS, _FAIR = 25, 3  # at most; before any call is dropped
_BEHIND = 1.5  # times the least seconds of the best: a call that takes longer is dropped
_PATIENCE, _MOST = 1.5, 6.0  # seconds: enough after _FAIR turns; enough in any case
_FLOAT_NBYTES = 4

Call = Callable[[], object]


class Curve(NamedTuple):
    """Seconds by nbytes: straight between measured points, and never falling.

    >>> Curve(((1000, 1.0), (2000, 3.0))).cost(1500)
    2.0
    """

    points: tuple[tuple[float, float], ...]

    def cost(self, nbytes: float) -> float:
        """Return the seconds of so many bytes; above the largest point, by the mean slope."""
        (first, least), (last, most) = self.points[0], self.points[-1]
        if nbytes <= first:
            return least
        if nbytes >= last:
            return most + (most - least) / (last - first) * (nbytes - last)
        around = (pair for pair in pairwise(self.points) if nbytes <= pair[1][0])
        (low, below), (high, above) = next(around)
        return below + (above - below) * (nbytes - low) / (high - low)


def rising(sizes: Sequence[int], seconds: Sequence[float]) -> Curve:
    """Return the curve through these points; one below its predecessor is noise, and is raised."""
    return Curve(tuple(zip(sizes, accumulate(seconds, max), strict=True)))


def probe(
    group: Group, device: torch.device, *, sizes: tuple[int, ...] = SIZES
) -> tuple[Curve, Curve]:
    """Return the curves of one message and of the backend's all-reduce, at rising sizes.

    All ranks of the group, two at least, must call it.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    passing = Leg({(rank + 1) % world: [0]}, {(rank - 1) % world: [(0, True)]})
    calls: list[Call] = []
    for nbytes in sizes:
        flat = blank(nbytes, device)
        calls.append(partial(run_legs, flat, (passing,), chunks=1, group=group))
        calls.append(partial(dist.all_reduce, flat, group=group))
    turns = [[_seconds(call, device) for call in calls] for _ in range(1 + _REPEATS)]
    counted = zip(*turns[1:], strict=True)  # the first opens connections and allocates buffers
    medians = torch.tensor([statistics.median(timings) for timings in counted], device=device)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX, group=group)
    message, native = medians.view(-1, 2).T.tolist()
    return rising(sizes, message), rising(sizes, native)


def blank(nbytes: int, device: torch.device) -> Tensor:
    """Return a message to be timed: zeros stay zeros, however often they are summed."""
    return torch.zeros(max(1, nbytes // _FLOAT_NBYTES), device=device)


def in_a_row(nbytes: int, most: int = 8) -> int:
    """Return how many messages make one timing: several if they are short, as in training.

    >>> [in_a_row(nbytes) for nbytes in (4096, 65536, 2**20)]
    [8, 4, 1]
    """
    return max(1, min(most, (1 << 18) // nbytes))


def race(calls: Sequence[Call], group: Group, device: torch.device) -> list[float]:
    """Time calls in turns, and return their median seconds; infinite for those that fell behind.

    After each turn all ranks have the times of the slowest rank, so all drop the same calls: after
    a few turns, or after the first one if it takes long. All ranks must call this function.
    """
    timings: list[list[float]] = [[] for _ in calls]
    running, spent = list(range(len(calls))), 0.0
    for turn in range(1 + _TURNS):
        seconds = torch.zeros(len(calls), device=device, dtype=torch.float64)
        for i in running if turn % 2 else reversed(running):
            dist.barrier(group=group)
            seconds[i] = _seconds(calls[i], device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
        spent += float(seconds.sum())
        if turn == 0 and spent < _PATIENCE:
            continue  # it opened connections and allocated buffers
        for i in running:
            timings[i].append(float(seconds[i]))
        if turn == 0 or turn >= _FAIR:
            running = sorted(close({i: min(timings[i]) for i in running}, _BEHIND))
        if len(running) == 1 or spent > (_PATIENCE if turn >= _FAIR else _MOST):
            break
    return [statistics.median(timings[i]) if i in running else math.inf for i in range(len(calls))]


def _seconds(call: Call, device: torch.device) -> float:
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
