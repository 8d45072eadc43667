"""Time contenders side by side, in the same worker processes, block by block.

All contenders live in every worker process, so that what differs between processes (core, noisy
neighbours) affects all alike. The memory addresses of a contender's tensors are random, and change
the time of a step by 2 %. So a measurement has a few rounds, each with new workers that build the
contenders in another order. A block times a step or a few of each contender, one after the other,
each behind a barrier, in the orders of ``statistics``.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing as mp
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from threading import Thread

from shoal.bench.contenders import prepare
from shoal.bench.statistics import ORDERS, Timings, slowest, turns
from shoal.testing.processes import run_workers

_WARM_UP_STEPS = 4  # DDP rebuilds its buckets in the second, allocators settle in the third
_REPORT_SECONDS = 0.2
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


@dataclass(frozen=True)
class TimingPlan:
    """What to time; every worker receives all of it.

    Attributes:
        workload: name of the model and its data.
        subject: name of the contender that is measured.
        peer: name of the one it is compared with; runs twice, the second time as the control.
        workers: number of processes; a single one is timed in CPU seconds.
        blocks: how often each contender is timed.
        steps: training steps in one timing.
        rounds: how often new workers are started; each times a multiple of six blocks.
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


def measure(plan: TimingPlan, progress: Callable[[int, int], None]) -> Timings:
    """Return seconds per step of each contender in each block, those of the slowest worker."""
    timings = Timings([], [], [])
    blocks = -(-plan.blocks // plan.rounds)  # of a round
    if plan.rounds > 1:
        blocks += -blocks % len(ORDERS)  # each round ends with the last of the orders
    for round in range(plan.rounds):

        def report(done: int, before: int = round * blocks) -> None:
            progress(before + done, plan.rounds * blocks)

        with _progress_pipe(report) as pipe:
            part = replace(plan, blocks=blocks)
            workers = run_workers(plan.workers, time_blocks, part, pipe, round, seconds=900)
        for contender, seconds in zip(timings, zip(*workers, strict=True), strict=True):
            contender.extend(slowest(seconds))
    return timings


def time_blocks(plan: TimingPlan, pipe: Connection, round: int = 0) -> list[list[float]]:
    """Build every contender in this worker, warm up, and time them in turns.

    ``pipe`` receives the number of blocks done. ``round`` decides the order of building.
    """
    keep_memory()
    names = (plan.subject, plan.peer, plan.peer)
    order = [(round + i) % len(names) for i in range(len(names))]
    built, barrier, leads = prepare(plan.workload, tuple(names[i] for i in order), plan.seed)
    steps = [built[order.index(i)] for i in range(len(names))]
    for step in steps * _WARM_UP_STEPS:
        step()
    gc.collect()
    # One worker never waits, so its cost is its CPU time, which other processes disturb least.
    clock = time.perf_counter if plan.workers > 1 else time.process_time
    last = time.monotonic()
    seconds: list[list[float]] = [[] for _ in steps]
    for block in range(plan.blocks):
        for which in ORDERS[block % len(ORDERS)]:
            barrier()
            begin = clock()
            for _ in range(plan.steps):
                steps[which]()
            seconds[which].append((clock() - begin) / plan.steps)
        if leads and time.monotonic() - last > _REPORT_SECONDS:  # seldom enough to cost nothing
            last = time.monotonic()
            with suppress(OSError):  # the pipe is closed: timing goes on without progress
                pipe.send_bytes((block + 1).to_bytes(4, "little"))
    return seconds


def time_in_turns(
    calls: Mapping[str, Callable[[], object]], repeats: int, blocks: int
) -> dict[str, list[float]]:
    """Return, in a worker, the seconds per call of each contender in each block.

    Two more blocks warm up first: connections, buffers, a choice of route.
    """
    import torch.distributed as dist

    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for block in range(-2, blocks):
        for name in (names[which] for which in turns(block, len(names))):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(repeats):
                calls[name]()
            seconds[name].append((time.perf_counter() - begin) / repeats)
    return {name: times[2:] for name, times in seconds.items()}


def keep_memory() -> None:
    """Tell glibc to return no memory to the system while contenders share a process.

    Otherwise the contender that runs after a large free pays the page faults of all: the CPU time
    of one and the same loop rose from 27 to 40 ms, depending on what had run before it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_MMAP_THRESHOLD, 2**25)  # the largest that glibc takes


@contextmanager
def _progress_pipe(report: Callable[[int], None]) -> Iterator[Connection]:
    """Open a pipe for the workers; ``report`` is called with each count that arrives."""
    receiver, sender = mp.get_context("forkserver").Pipe(duplex=False)

    def listen() -> None:
        with suppress(EOFError, OSError):
            while True:
                report(int.from_bytes(receiver.recv_bytes(), "little"))

    listener = Thread(target=listen, name="bench progress", daemon=True)
    listener.start()
    try:
        yield sender
    finally:
        sender.close()  # workers are gone, so this was the last end: the listener reads its EOF
        listener.join(5)
        receiver.close()
