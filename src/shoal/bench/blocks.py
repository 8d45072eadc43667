"""Time contenders side by side, in the same worker processes, block by block.

All contenders live in every worker from the beginning to the end, so that a process's luck (its
core, its memory, its neighbours) is shared. A block is a few steps of each, one after the other,
behind a barrier; the order turns round from block to block. Workers report progress on a pipe.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from threading import Thread

from shoal.bench.contenders import prepare
from shoal.bench.statistics import order
from shoal.testing.processes import run_workers

Seconds = list[float]
_WARM_UP_STEPS = 4  # DDP rebuilds its buckets in the second, allocators settle in the third
_REPORT_SECONDS = 0.2


@dataclass(frozen=True)
class Plan:
    """What to time; workers receive it whole.

    Attributes:
        workload: name of the model and its data.
        contenders: names of who trains it, the one measured against in the middle.
        workers: how many processes; one has no peers and times in CPU seconds.
        blocks: how often each contender is timed.
        steps: training steps in one timing.
        seed: of data and initial parameters.
    """

    workload: str
    contenders: tuple[str, ...]
    workers: int
    blocks: int
    steps: int = 1
    seed: int = 0


def measure(plan: Plan, progress: Callable[[int, int], None]) -> list[Seconds]:
    """Seconds per step of each contender in each block; the slowest worker's, where several."""
    with _reports(lambda done: progress(done, plan.blocks)) as pipe:
        each = run_workers(plan.workers, time_blocks, plan, pipe, seconds=900)
    return [
        [max(block) for block in zip(*(worker[i] for worker in each), strict=True)]
        for i in range(len(plan.contenders))
    ]


def time_blocks(plan: Plan, pipe: Connection) -> list[Seconds]:
    """What each worker does: build every contender, warm up, time them in turns."""
    steps, meet, leads = prepare(plan.workload, plan.contenders, plan.seed)
    for step in steps * _WARM_UP_STEPS:
        step()
    gc.collect()
    # One worker never waits, so what it costs is its CPU time, which neighbours disturb least.
    clock = time.perf_counter if plan.workers > 1 else time.process_time
    tell = _teller(pipe if leads else None)
    seconds: list[Seconds] = [[] for _ in steps]
    for block in range(plan.blocks):
        for which in order(block, len(steps)):
            meet()
            seconds[which].append(_time(steps[which], plan.steps, clock))
        tell(block + 1)
    return seconds


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
