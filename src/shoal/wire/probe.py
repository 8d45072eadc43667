"""Measure how long a message, the backend's all-reduce and whole routes take on a network.

A message is timed with the code that later runs the routes (``run_rounds``). Each rank sends to
rank + 1, receives from rank - 1 and adds what it received, so the time of this is included.
The times of the slowest rank count (in ``probe``, the largest of the ranks' medians). All ranks get
these by an all-reduce, so the times are equal bit for bit and all ranks make the same choices.
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
from shoal.wire.route import Group, RankRound, run_rounds

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20)
_REPEATS = 7
_MAX_TURNS = 25  # the most turns of a race after its first turn
_MIN_TURNS = 3  # after this many turns, or after a long first turn, a race drops slow calls
_DROP_FACTOR = 1.5  # a race drops a call that takes longer than this times the fastest
_MIN_SECONDS = 1.5  # a race that had _MIN_TURNS ends after this time
_MAX_SECONDS = 6.0  # any race ends after this time
_FLOAT_NBYTES = 4

Call = Callable[[], object]


class Curve(NamedTuple):
    """Seconds as a function of nbytes, linear between measured points (nbytes, seconds).

    >>> Curve(((1000, 1.0), (2000, 3.0))).cost(1500)
    2.0
    """

    points: tuple[tuple[float, float], ...]

    def cost(self, nbytes: float) -> float:
        """Return the seconds that ``nbytes`` take.

        Below the first point these are the seconds of that point. Above the last point the curve
        goes on with the mean slope of all points.
        """
        (first, least), (last, most) = self.points[0], self.points[-1]
        if nbytes <= first:
            return least
        if nbytes >= last:
            return most + (most - least) / (last - first) * (nbytes - last)
        segments = (pair for pair in pairwise(self.points) if nbytes <= pair[1][0])
        (low, below), (high, above) = next(segments)
        return below + (above - below) * (nbytes - low) / (high - low)


def rising(sizes: Sequence[int], seconds: Sequence[float]) -> Curve:
    """Return the curve through these points. A point below the one before (noise) is raised."""
    return Curve(tuple(zip(sizes, accumulate(seconds, max), strict=True)))


def probe(
    group: Group, device: torch.device, *, sizes: tuple[int, ...] = SIZES
) -> tuple[Curve, Curve]:
    """Return the curves of one message and of the backend's all-reduce, timed at ``sizes``.

    ``sizes`` are ascending numbers of bytes. All ranks of the group must call this function, and
    the group must have at least two ranks.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    to_right = RankRound({(rank + 1) % world: [0]}, {(rank - 1) % world: [(0, True)]})
    calls: list[Call] = []
    for nbytes in sizes:
        flat = blank(nbytes, device)
        calls.append(partial(run_rounds, flat, (to_right,), chunks=1, group=group))
        calls.append(partial(dist.all_reduce, flat, group=group))
    turns = [[_seconds(call, device) for call in calls] for _ in range(1 + _REPEATS)]
    counted = zip(*turns[1:], strict=True)  # the first turn opens connections and allocates buffers
    medians = torch.tensor([statistics.median(timings) for timings in counted], device=device)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX, group=group)
    message, native = medians.view(-1, 2).T.tolist()
    return rising(sizes, message), rising(sizes, native)


def blank(nbytes: int, device: torch.device) -> Tensor:
    """Return a float32 tensor of ``nbytes`` with at least one element; zeros keep sums finite."""
    return torch.zeros(max(1, nbytes // _FLOAT_NBYTES), device=device)


def in_a_row(nbytes: int, most: int = 8) -> int:
    """Return how many messages to time together, which is more for short messages.

    >>> [in_a_row(nbytes) for nbytes in (4096, 65536, 2**20)]
    [8, 4, 1]
    """
    return max(1, min(most, (1 << 18) // nbytes))


def race(calls: Sequence[Call], group: Group, device: torch.device) -> list[float]:
    """Time calls in turns, and return the median seconds of each, or infinity if it was dropped.

    Calls much slower than the fastest are dropped after the first turn if that turn takes long, and
    after each turn from turn ``_MIN_TURNS`` on. After each turn all ranks get the times of the
    slowest rank, so all ranks drop the same calls. All ranks must call this function.
    """
    timings: list[list[float]] = [[] for _ in calls]
    running, spent = list(range(len(calls))), 0.0
    for turn in range(1 + _MAX_TURNS):
        seconds = torch.zeros(len(calls), device=device, dtype=torch.float64)
        for i in running if turn % 2 else reversed(running):
            dist.barrier(group=group)
            seconds[i] = _seconds(calls[i], device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
        spent += float(seconds.sum())
        if turn == 0 and spent < _MIN_SECONDS:
            continue  # not counted, because this turn opened connections and allocated buffers
        for i in running:
            timings[i].append(float(seconds[i]))
        if turn == 0 or turn >= _MIN_TURNS:
            running = sorted(close({i: min(timings[i]) for i in running}, _DROP_FACTOR))
        if len(running) == 1 or spent > (_MIN_SECONDS if turn >= _MIN_TURNS else _MAX_SECONDS):
            break
    return [statistics.median(timings[i]) if i in running else math.inf for i in range(len(calls))]


def _seconds(call: Call, device: torch.device) -> float:
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
