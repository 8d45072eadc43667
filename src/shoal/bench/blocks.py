"""Time contenders side by side, in the same worker processes, block by block.

All contenders live in every worker of a round, so that a process's luck (its core, its neighbours)
is shared. Where each one's tensors lie is luck too, worth 2 % of a step; so a measurement has a few
rounds, each with new workers, in which contenders are built in another order. A block is a step or
a few of each, one after the other, each behind a barrier, in the orders of ``statistics``. Progress
comes back on a pipe.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing as mp
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from threading import Thread

from shoal.bench.contenders import prepare
from shoal.bench.statistics import ORDERS, Timings
from shoal.testing.processes import run_workers

_WARM_UP_STEPS = 4  # DDP rebuilds its buckets in the second, allocators settle in the third
_REPORT_SECONDS = 0.2
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


@dataclass(frozen=True)
class Plan:
    """What to time; workers receive it whole.

    Attributes:
        workload: name of the model and its data.
        subject: name of the contender that is measured.
        peer: name of the one it is measured against; runs twice, as the control too.
        workers: how many processes; one has no peers and times in CPU seconds.
        blocks: how often each contender is timed.
        steps: training steps in one timing.
        rounds: how often workers are started anew; blocks are shared out, in sixes.
        seed: of data and initial parameters.
    """

    workload: str
    subject: str
    peer: str
    workers: int
    blocks: int
    steps: int = 1
    rounds: int = 1
    seed: int = 0


def measure(plan: Plan, progress: Callable[[int, int], None]) -> Timings:
    """Seconds per step of each contender in each block; the slowest worker's, where several."""
    timings = Timings([], [], [])
    each = -(-plan.blocks // plan.rounds)
    if plan.rounds > 1:
        each += -each % len(ORDERS)  # the next round goes on where the last one's orders ended
    for turn in range(plan.rounds):

        def tell(done: int, before: int = turn * each) -> None:
            progress(before + done, plan.rounds * each)

        with _reports(tell) as pipe:
            part = replace(plan, blocks=each)
            workers = run_workers(plan.workers, time_blocks, part, pipe, turn, seconds=900)
        for one, found in zip(timings, zip(*workers, strict=True), strict=True):
            one.extend(slowest(found))
    return timings


def slowest(workers: Sequence[Sequence[float]]) -> list[float]:
    """Block by block, the longest time that a worker took."""
    return [max(block) for block in zip(*workers, strict=True)]


def time_blocks(plan: Plan, pipe: Connection, turn: int = 0) -> list[list[float]]:
    """What each worker does: build every contender, warm up, time them in turns.

    Args:
        plan: what to time, in one round.
        pipe: where to tell how many blocks are done.
        turn: which round it is, for the order in which contenders are built.
    """
    keep_memory()
    names = (plan.subject, plan.peer, plan.peer)
    built = [(turn + i) % len(names) for i in range(len(names))]
    made, meet, leads = prepare(plan.workload, tuple(names[i] for i in built), plan.seed)
    steps = [made[built.index(i)] for i in range(len(names))]
    for step in steps * _WARM_UP_STEPS:
        step()
    gc.collect()
    # One worker never waits, so what it costs is its CPU time, which neighbours disturb least.
    clock = time.perf_counter if plan.workers > 1 else time.process_time
    tell = _teller(pipe if leads else None)
    seconds: list[list[float]] = [[] for _ in steps]
    for block in range(plan.blocks):
        for which in ORDERS[block % len(ORDERS)]:
            meet()
            seconds[which].append(_time(steps[which], plan.steps, clock))
        tell(block + 1)
    return seconds


def keep_memory() -> None:
    """Tell glibc to give no memory back to the system while contenders share a process.

    Otherwise whoever comes after a large free pays the page faults of all: the CPU time of one
    and the same loop went from 27 to 40 ms with who had run before it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_MMAP_THRESHOLD, 2**25)  # the largest that glibc takes


def _time(step: Callable[[], object], count: int, clock: Callable[[], float]) -> float:
    begin = clock()
    for _ in range(count):
        step()
    return (clock() - begin) / count


def _teller(pipe: Connection | None) -> Callable[[int], None]:
    """Sends how many blocks are done, seldom enough to cost nothing."""
    last = time.monotonic()

    def tell(done: int) -> None:
        nonlocal last
        if pipe is not None and time.monotonic() - last > _REPORT_SECONDS:
            last = time.monotonic()
            with suppress(OSError):  # nobody listens any more: the timing goes on
                pipe.send_bytes(done.to_bytes(4, "little"))

    return tell


@contextmanager
def _reports(tell: Callable[[int], None]) -> Iterator[Connection]:
    """A pipe for workers to send counts on; each is told here as it arrives."""
    mine, theirs = mp.get_context("forkserver").Pipe(duplex=False)

    def listen() -> None:
        with suppress(EOFError, OSError):
            while True:
                tell(int.from_bytes(mine.recv_bytes(), "little"))

    listener = Thread(target=listen, name="bench progress", daemon=True)
    listener.start()
    try:
        yield theirs
    finally:
        theirs.close()  # workers are gone, so this was the last end: the listener reads its EOF
        listener.join(5)
        mine.close()
