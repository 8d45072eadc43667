"""Groups come and go: many at once, again and again, in forked and spawned processes."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from shm_worlds import enter

from shoal.testing.processes import free_port, run_workers
from shoal.wire.shm import register

pytestmark = pytest.mark.gloo


def held() -> tuple[int, int, int]:
    """File descriptors, threads and shared mappings of this process."""
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8") as file:
        maps = sum("memfd:shoal" in line or "shoal-" in line for line in file)
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps


def hundred() -> None:
    rank, size = enter()
    counts = []
    for turn in range(100):
        group = dist.new_group(backend="shoal")
        x = torch.full((100,), float(rank))
        dist.all_reduce(x, group=group, async_op=True).wait()
        dist.barrier(group)
        if turn % 10 == 0:  # a thread for messages, too
            work = dist.irecv(x, (rank - 1) % size, group=group)
            dist.send(torch.ones(100), (rank + 1) % size, group=group)
            work.wait()
        dist.destroy_process_group(group)
        del group
        if turn in (9, 99):
            counts.append(held())
    early, late = counts
    assert all(after <= before for before, after in zip(early, late, strict=True)), counts


def test_a_hundred_groups_leak_nothing() -> None:
    run_workers(2, hundred)


def again() -> None:
    for turn in range(3):
        _, size = enter()
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.eq(size).all(), turn
        dist.barrier()
        dist.destroy_process_group()
        assert held()[2] == 0


def test_the_default_group_can_be_destroyed_and_made_again() -> None:
    run_workers(2, again)


def several() -> None:
    rank, _ = enter()
    rows = [dist.new_group([0, 1], backend="shoal"), dist.new_group([2, 3], backend="shoal")]
    columns = [dist.new_group([0, 2], backend="shoal"), dist.new_group([1, 3], backend="shoal")]
    a, b, c = (torch.full((200_000,), float(rank)) for _ in range(3))
    works = [
        dist.all_reduce(a, group=rows[rank // 2], async_op=True),
        dist.all_reduce(b, group=columns[rank % 2], async_op=True),
        dist.all_reduce(c, async_op=True),
    ]
    for work in works:
        work.wait()
    assert a[0].item() == (1 if rank < 2 else 5)
    assert b[0].item() == (2 if rank % 2 == 0 else 4)
    assert c[0].item() == 6


def test_groups_that_overlap_work_at_once() -> None:
    run_workers(4, several)


def as_child(rank: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    enter()
    x = torch.ones(5)
    dist.all_reduce(x)
    assert x.eq(2).all()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_forked_and_spawned_processes_meet(method: str) -> None:
    context, port = mp.get_context(method), free_port()
    children = [context.Process(target=as_child, args=(rank, port)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0]


def inherited() -> int:
    rank, _ = enter()
    x = torch.ones(1)
    dist.all_reduce(x)
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (dist.all_reduce, partial(dist.isend, dst=1 - rank), dist.irecv):
            try:
                call(x)
            except ValueError as error:
                refused += "fork" in str(error)
        dist.destroy_process_group()  # its own view of it
        os._exit(refused)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    dist.all_reduce(x)
    assert x.eq(4).all()
    return code


def test_a_forked_child_can_neither_use_nor_end_its_parents_group() -> None:
    assert run_workers(2, inherited) == [3, 3]


ALONE = """
import sys
{first}
from shoal.wire.shm import register
register()
{second}
assert "shoal.wire.shm.backend.process_group" not in sys.modules
dist.init_process_group("shoal", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(3)
dist.all_reduce(x)
dist.barrier()
dist.monitored_barrier()
assert x.eq(1).all()
assert sum(type(f).__name__ == "_Finder" for f in sys.meta_path) == 0
dist.destroy_process_group()
"""
TORCH = "import torch\nimport torch.distributed as dist"


@pytest.mark.parametrize(("first", "second"), [(TORCH, ""), ("", TORCH), ("import torch", TORCH)])
def test_the_backend_is_known_whatever_is_imported_first(first: str, second: str) -> None:
    script = ALONE.format(first=first, second=second)
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)


def by_file(path: str) -> None:
    register()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    group = dist.new_group(backend="shoal")  # beside a default group on gloo
    x = torch.ones(4)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x)
    assert x.eq(4).all()


def test_any_store_will_do_and_any_default_group(tmp_path: Path) -> None:
    run_workers(2, by_file, str(tmp_path / "store"))
