"""What workers of these tests begin with."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from shoal.wire.shm import register
from shoal.wire.shm.memory.cma import Token, can_read


def enter(seconds: float = 60) -> tuple[int, int]:
    """Make the default group on the shoal backend; return rank and size."""
    register()
    dist.init_process_group("shoal", timeout=timedelta(seconds=seconds))
    return dist.get_rank(), dist.get_world_size()


def gloo(seconds: float = 60) -> dist.ProcessGroup:
    """A group of all ranks on gloo, to compare with."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))


def _reads_its_parent() -> bool:
    """Whether a child may read its parent's memory; else nor may ranks each other's."""
    token, parent = Token(), os.getpid()
    child = os.fork()
    if child == 0:
        os._exit(0 if can_read(parent, token.card) else 1)
    return os.waitpid(child, 0)[1] == 0


needs_reading = pytest.mark.skipif(
    not _reads_its_parent(), reason="this kernel lets no rank read another's memory"
)
