"""Time contenders in the same worker processes, block by block.

Every worker process runs all contenders, so that differences between processes (core, other load)
affect all contenders alike. The memory addresses of a contender's tensors are random, and change
the time of a step by 2 %. So a measurement has a few rounds, each with new workers that build the
contenders in another order. In a block, each contender in turn runs one or a few steps, which are
timed; a barrier comes before each contender. ``statistics`` defines the order of the turns.
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

_WARM_UP_STEPS = 4  # DDP rebuilds its buckets in step 2, and allocators still grow in step 3
_REPORT_SECONDS = 0.2
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h


@dataclass(frozen=True)
class TimingPlan:
    """What to time; every worker receives all of it.

    Attributes:
        workload: name of the model and its data, a key of ``WORKLOADS``.
        subject: name of the contender that is measured.
        peer: name of the contender to compare with; a second instance of it is the control.
        workers: number of processes; with 1, CPU time is measured instead of wall time.
        blocks: least number of timings of each contender, in all rounds together.
        steps: number of training steps in one timing.
        rounds: number of rounds; each starts new workers. If there are several rounds, each has a
            multiple of six blocks.
        seed: seed of the data and of the initial parameters.
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
    """Return the seconds per step of each contender in each block, on the slowest worker."""
    timings = Timings([], [], [])
    blocks = -(-plan.blocks // plan.rounds)  # in one round
    if plan.rounds > 1:
        blocks += -blocks % len(ORDERS)  # so that each order occurs equally often
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
    """Return the seconds per step of subject, peer and twin in this worker, block by block.

    All workers must call this. Rank 0 sends the number of blocks done to ``pipe``. ``round``
    determines in which order the contenders are built.
    """
    keep_memory()
    names = (plan.subject, plan.peer, plan.peer)
    order = [(round + i) % len(names) for i in range(len(names))]
    built, barrier, leads = prepare(plan.workload, tuple(names[i] for i in order), plan.seed)
    steps = [built[order.index(i)] for i in range(len(names))]
    for step in steps * _WARM_UP_STEPS:
        step()
    gc.collect()
    # A single worker waits for nobody. Its CPU time depends less on other processes than wall time.
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
        if leads and time.monotonic() - last > _REPORT_SECONDS:  # seldom, so as to disturb little
            last = time.monotonic()
            with suppress(OSError):  # if the pipe is closed, go on without showing progress
                pipe.send_bytes((block + 1).to_bytes(4, "little"))
    return seconds


def time_in_turns(
    calls: Mapping[str, Callable[[], object]], repeats: int, blocks: int
) -> dict[str, list[float]]:
    """Return the seconds per call of each contender in this worker, block by block.

    All workers of the default group must call this. Two additional blocks come first and are not
    returned: in them connections and buffers are made, and routes are chosen.
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
    """Tell glibc to return as little memory as possible to the system, if this process uses glibc.

    Otherwise, of several contenders in a process, the one that runs after a large free has more
    page faults: the CPU time of the same loop rose from 27 to 40 ms, depending on what ran before.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_MMAP_THRESHOLD, 2**25)  # the largest value that glibc accepts


@contextmanager
def _progress_pipe(report: Callable[[int], None]) -> Iterator[Connection]:
    """Yield the sending end of a pipe; call ``report`` with each number that workers send."""
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
        sender.close()  # the workers have ended, so this was the last sender: listen() gets an EOF
        listener.join(5)
        receiver.close()
